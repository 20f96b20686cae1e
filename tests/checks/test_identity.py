"""Files of another rank, step or run among those of a checkpoint: refused, and never by mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reshard
from reshard import formats
from reshard.checks.identity import check_identity, crosscheck, find_conflicts
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.core import stamps
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from reshard.core.manifest import Claim
from reshard.errors import CorruptError, UsageError
from tests.support.programs import run_python

DATA = Path(__file__).parents[1] / "data"
ZERO = DATA / "deepspeed_0.8.3/z2_apexadam/run"
MEGATRON = DATA / "megatron/llama_tp2pp2/ckpt"
OPTIMIZERS = "*_optim_states.pt"
SOUND = [
    *sorted(DATA.glob("deepspeed_*/*/run")),
    *sorted(DATA.glob("colossalai/*/ckpt")),
    *sorted(DATA.glob("megatron*/*/ckpt")),
    *sorted(DATA.glob("megatron*/*/torch*")),
    DATA / "megatron_deepspeed/tp2pp2dp2/run",
    DATA / "bloom/tp2pp2/run",
    DATA / "gpt_neox/tp2pp0/run",
    DATA / "gpt_neox/tp2pp2/run",
    DATA / "meta/llama_mp2",
    DATA / "olmo_core/ckpt",
]


@pytest.mark.parametrize("source", SOUND, ids=lambda path: str(path.relative_to(DATA)))
@pytest.mark.parametrize("trust", ["sampled", "full"])
def test_a_sound_checkpoint_raises_no_alarm(source, trust):
    manifest = formats.read(source)
    check_identity(manifest, trust)
    assert not find_counter_conflicts(manifest)


def test_an_engine_that_counted_nothing_has_no_opinion():
    """A Fabric program calls ``step`` of the optimizer, not of DeepSpeed's engine."""
    manifest = formats.read(ZERO)
    for path, samples, client, fits in (
        ("run/checkpoint", 0, {}, True),
        ("run/checkpoint", 8, {}, False),
        ("run/checkpoint", 0, {"pytorch-lightning_version": "2.6.6"}, False),
        ("run/tag", 0, {}, False),
    ):
        origin = replace(manifest.origin, path=path)
        train = replace(manifest.train, step=0, skipped_steps=0, samples=samples, client=client)
        changed = replace(manifest, origin=origin, train=train)
        assert (not find_counter_conflicts(changed)) == fits


def test_a_word_that_is_no_level_of_trust_is_refused(tmp_path):
    with pytest.raises(UsageError, match="full, sampled, none"):
        reshard.merge(ZERO, tmp_path / "out", trust="some")


def claiming(manifest, **claims):
    """Return the manifest with claims of its files, in their order."""
    files = dict(manifest.files)
    for number, path in enumerate(files):
        own = tuple(Claim(about, values[number], "a test") for about, values in claims.items())
        files[path] = replace(files[path], claims=own)
    return replace(manifest, files=files)


def test_one_file_of_another_save_is_named_and_not_the_others():
    manifest = formats.read(ZERO)
    count = len(manifest.files)
    assert count > 2
    (conflict,) = find_conflicts(claiming(manifest, save=["b", *"a" * (count - 1)]).files)
    assert conflict.file == next(iter(manifest.files))
    assert "save b" in conflict.problem
    assert not find_conflicts(claiming(manifest, save="a" * count).files)


def test_stamps_of_two_saves_are_refused(tmp_path):
    for rank in range(2):
        stamp = stamps.Stamp(f"save {rank}", rank, 2, 3, f"rank_{rank}.pt")
        state = {"model": {"w": torch.ones(4)}, stamps.KEY: stamp.as_dict()}
        torch.save(state, tmp_path / f"rank_{rank}.pt")
    with pytest.raises(CorruptError, match="files of two saves are mixed"):
        reshard.merge(tmp_path, tmp_path.with_suffix(".safetensors"))


@pytest.mark.parametrize("trained", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_an_element_that_is_not_the_cast_of_its_master_is_marked(trained):
    chance = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2**31, (20_000,), generator=chance, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    values = values[torch.isfinite(values) & (values.abs() < 60_000)]
    weights = values.to(getattr(torch, trained.name))
    masters, marks = bytearray(values.numpy().tobytes()), bytearray(len(values))
    for number, value in ((None, 0.0), (7, 70_000.0), (-1, torch.nan)):
        if number is not None:
            weights[number], marks[number] = value, 1
        stored = bytearray(weights.view(torch.uint8).numpy().tobytes())
        assert crosscheck._mark_unequal(masters, stored, FLOAT32, trained) == marks
        assert crosscheck._mark_unequal_numbers(masters, stored, FLOAT32, trained) == marks


def test_a_small_merge_imports_no_numpy_to_compare_its_files(tmp_path):
    probe = (
        "import sys; import reshard.formats as f\n"
        "from reshard.checks.identity import check_identity\n"
        f"i = check_identity(f.read({str(ZERO)!r}));"
        "assert i.compared and 'numpy' not in sys.modules, sorted(sys.modules)"
    )
    run_python("-c", probe, check=True)
