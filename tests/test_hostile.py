"""Whole checkpoints that lie: each ends in one clear message, soon, and in little memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.hostile import case, damage, recipes, seeds, targets
from reshard import cli, formats
from reshard.box import whole
from reshard.dtypes import FLOAT32
from reshard.errors import CorruptError, ReshardError, UnsafeError, UsageError
from reshard.formats.deepspeed import cuts, native
from reshard.formats.megatron import arguments
from reshard.formats.state_dict import tree
from reshard.formats.state_dict.tree import Local
from reshard.manifest import contiguous
from reshard.model_parallel.traits import Traits
from reshard.pickles.values import Global

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
ELSEWHERE = Path(tempfile.gettempdir(), f".hostile-{os.getpid()}")
ODD = "a\x1b[31m.\u202ex\nverified: yes"


def run(*words, **options):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
        **options,
    )


# ------------------------------------------------------------------------------- seeded mutations


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches memory by /proc")
def test_some_hundred_damaged_checkpoints_are_read_or_refused(tmp_path):
    words = ["--cases", "250", "--seed", "3", "--workers", "1", "--scratch", tmp_path]
    done = run("-m", "benchmarks.hostile", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "250 cases of" in done.stdout


def test_a_case_is_a_function_of_its_number():
    chosen = seeds.kept()

    def made(index):
        chance = Random(f"1:{index}")
        found = damage.damaged(chance, chance.choice(chosen))
        return found.seed.name, found.names, found.altered, found.log

    assert made(11) == made(11)
    assert made(11) != made(12)


def test_a_recipe_is_a_damaged_checkpoint(tmp_path):
    chance = Random(1)
    seed = next(seed for seed in seeds.kept() if seed.name == targets.TARGETS[6].checkpoint)
    recipe = recipes.made(chance, steps=2)
    for _ in range(20):
        recipe = recipes.varied(chance, recipes.crossed(chance, recipe, recipes.made(chance)))
    cooked = [recipes.cooked(recipe, seed, seed.files)[1] for _ in range(2)]
    assert cooked[0].log == cooked[1].log
    assert cooked[0].altered == cooked[1].altered
    assert cooked[0].log
    assert not recipes.cooked(b"", seed, seed.files)[1].log


def test_every_format_is_fuzzed():
    """The kept checkpoints of the table are there, and the table has all formats with one."""
    held = {seed.name: seed for seed in seeds.kept()}
    kept = [held[t.checkpoint] for t in targets.TARGETS if t.checkpoint in held]
    named = [t.checkpoint for t in targets.TARGETS if t.checkpoint.startswith(("tests", "exampl"))]
    assert set(named) == {seed.name for seed in kept}
    fuzzed = {formats.read(seed.place / seed.given).origin.format for seed in kept}
    every = {
        formats.read(seed.place / seed.given).origin.format
        for seed in held.values()
        if ":" not in seed.name
    }
    assert fuzzed == every


def _raises():
    raise KeyError("of a reader")


MISTAKES = {
    "an error of Python's": (_raises, "KeyError"),
    "a system error": (lambda: Path("nowhere").read_bytes(), "FileNotFoundError"),
    "a program": (lambda: os.posix_spawn("/bin/true", ["true"], {}) and None, "posix_spawn"),
    "memory": (lambda: bytearray(600 << 20) and None, "took "),
    "an escape sequence": (lambda: sys.stdout.write("\x1b[2J") and None, "prints"),
    "a file elsewhere": (lambda: ELSEWHERE.write_text("x") and None, "open"),
    "a search without end": (lambda: re.match("(a+)+$", "a" * 60 + "b"), "_TooLong"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches memory by /proc")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_judge_notices(monkeypatch, tmp_path, mistake):
    act, noticed = MISTAKES[mistake]
    monkeypatch.setattr(case, "CPU_SECONDS", 1.0)
    monkeypatch.setattr(cli.cli, "main", lambda **_: act())
    (tmp_path / "out").mkdir()
    found = case.judged(["inspect", "x"], tmp_path / "out")
    ELSEWHERE.unlink(missing_ok=True)
    assert noticed in found.wrong


def test_the_judge_notices_what_is_left_behind(monkeypatch, tmp_path):
    (tmp_path / "out" / ".x.partial-1").mkdir(parents=True)

    def refuse(**_):
        raise CorruptError("x", "is damaged")

    monkeypatch.setattr(cli.cli, "main", refuse)
    found = case.judged(["merge", "x", "out/x.pt"], tmp_path / "out")
    assert (found.code, found.wrong) == (3, "leaves ['.x.partial-1']")


# ----------------------------------------------------------------------------- what is not a file


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "latest"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    done = run("-m", "reshard", "inspect", tmp_path / name, timeout=60)
    assert done.returncode == 2
    assert "neither a directory nor a plain file" in done.stderr


@pytest.mark.parametrize("name", ["latest", "model.safetensors.index.json", ".metadata"])
def test_a_small_file_that_claims_a_terabyte_is_refused(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    if name == "latest":
        (tmp_path / "step1").mkdir()
    with pytest.raises(CorruptError, match=r"has 1099511627776 bytes"):
        formats.read(tmp_path)


# ----------------------------------------------------------------------------------- what is shown


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.safetensors"
    save_file({ODD: torch.ones(2), "b": torch.ones(1)}, path)
    return path


COMMANDS = {
    "inspect": ["inspect", "ODD", "--tensors"],
    "merge": ["merge", "ODD", "OUT", "--rename", "^a=c"],
    "excluded": ["merge", "ODD", "OUT", "--exclude", "a"],
    "refused": ["merge", "ODD", "OUT", "--rename", "^.*=b"],
    "diff": ["diff", "ODD", "OTHER"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_is_shown_names_and_obeys_none(odd, tmp_path, command):
    save_file({ODD: torch.zeros(2), "b": torch.ones(1)}, tmp_path / "other.safetensors")
    places = {
        "ODD": odd,
        "OTHER": tmp_path / "other.safetensors",
        "OUT": tmp_path / "o.safetensors",
    }
    done = run("-m", "reshard", *(places.get(word, word) for word in COMMANDS[command]))
    said = done.stdout + done.stderr
    assert r"\x1b[31m.\u202ex\nverified: yes" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


def test_json_has_names_as_they_are(odd):
    done = run("-m", "reshard", "inspect", odd, "--tensors", "--json")
    assert ODD in [tensor["fqn"] for tensor in json.loads(done.stdout)["tensors"]]


def test_a_file_name_that_is_no_text_is_shown(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\x1b[2J.pt"
    Path(os.fsdecode(path)).write_bytes(b"nothing")
    done = run("-m", "reshard", "inspect", os.fsdecode(path))
    assert done.returncode == 2
    assert r"\udcff\x1b[2J.pt: is no checkpoint" in done.stderr


def test_a_message_is_never_longer_than_a_page():
    error = CorruptError("x" * 10**6, "y" * 10**6, "z" * 10**6)
    assert len(str(error)) < 10_000
    assert "more letters" in str(error)


# ------------------------------------------------------------- what a file says of itself


def replaced(path, **values):
    """A DeepSpeed file saved again with other values at its root, or in its optimizer."""
    root = torch.load(path, weights_only=False)
    (root.get("optimizer_state_dict") or root).update(values)
    torch.save(root, path)


@pytest.fixture
def zero(tmp_path):
    """A real ZeRO-3 run."""
    return Path(shutil.copytree(ROOT / "examples" / "llama-zero3-4ranks", tmp_path / "run"))


@pytest.mark.parametrize("size", [1 << 40, -1, "4", [4], 2.5])
def test_a_run_of_impossibly_many_ranks(zero, size):
    for path in zero.glob("*/zero_pp_rank_*_model_states.pt"):
        replaced(path, dp_world_size=size)
    with pytest.raises(CorruptError, match=r"model_states\.pt: says that dp_world_size is"):
        formats.read(zero)


OF_ANOTHER_KIND = {
    "param_shapes": (7, "param_shapes is 7, where a dict or a list is"),
    "a shape": ([{"w": (2, -1)}], r"param_shapes\[0\]\['w'\] is a tuple, where a shape is"),
    "buffer_names": ([1], r"buffer_names\[0\] is 1, where a text is"),
    "shared_params": ({"a": None}, r"shared_params\['a'\] is None, where a text is"),
    "global_steps": ((4,), "global_steps is a tuple, where an integer is"),
    "module": ({3: 4}, "module has 3 as a key, where a text is"),
}


@pytest.mark.parametrize("what", OF_ANOTHER_KIND)
def test_a_value_of_another_kind_is_named(zero, what):
    value, told = OF_ANOTHER_KIND[what]
    for path in zero.glob("*/zero_pp_rank_*_model_states.pt"):
        replaced(path, **{"param_shapes" if what == "a shape" else what: value})
    with pytest.raises(CorruptError, match=f"zero_pp_rank_0_mp_rank_00_model_states.pt: {told}"):
        formats.read(zero)


OF_OPTIMIZER = {
    "partition_count": ("4", "partition_count is '4', where an integer or a list is"),
    "fp32_flat_groups": ([7], r"fp32_flat_groups\[0\] is 7, where a tensor is"),
    "optimizer_state_dict": ({"state": {0: 7}}, r"optimizer_state_dict.state\[0\] is 7, where a"),
}


@pytest.mark.parametrize("what", OF_OPTIMIZER)
def test_a_value_of_another_kind_in_an_optimizer_is_named(zero, what):
    value, told = OF_OPTIMIZER[what]
    for path in zero.glob("*/*_optim_states.pt"):
        replaced(path, **{what: value})
    with pytest.raises(CorruptError, match=rf"_optim_states.pt: optimizer_state_dict\.{told}"):
        formats.read(zero)


def test_what_a_reader_trips_over_is_corrupt_and_not_a_bug(monkeypatch, zero):
    monkeypatch.setattr(native, "first_of", lambda _census: 7)
    with pytest.raises(CorruptError, match="not of the structure that its format has") as caught:
        formats.read(zero)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "native.py" in case.tripped(caught.value)


def test_a_rank_of_a_billion_in_a_name(tmp_path):
    run_dir = Path(shutil.copytree(DATA / "nanotron" / "tp2dp2", tmp_path / "run"))
    for path in run_dir.rglob("*_tp-rank-*-of-2.safetensors"):
        path.rename(path.with_name(path.name.replace("-of-2.", "-of-999999999.")))
    with pytest.raises(ReshardError, match="has no file of"):
        formats.read(run_dir / "ckpt")


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_model_parallel_size": 1 << 40},
        {"num_layers": 1 << 40},
        {"num_experts": 1 << 62},
        {"tensor_model_parallel_size": 1 << 12, "pipeline_model_parallel_size": 1 << 12},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_grid_of_megatrons_that_no_machine_has(given):
    with pytest.raises(CorruptError, match="says that"):
        arguments.of(given, "rank 0")


@pytest.mark.parametrize("layout", ["Et*999999999L", "(t*999999|)*999999", "(t)*" + "9" * 6000])
def test_a_pipeline_layout_without_end(layout):
    args = arguments.of({"pipeline_model_parallel_layout": layout}, "rank 0")
    with pytest.raises(CorruptError, match="rank 0: has a pipeline layout without end"):
        args.layers()


@pytest.mark.parametrize("field", ["heads", "groups", "head_dim", "hidden"])
@pytest.mark.parametrize("size", [0, -8, 1 << 40, "8"])
def test_a_model_of_impossible_sizes(field, size):
    with pytest.raises(CorruptError, match=r"params\.json: says that"):
        Traits(source="params.json", **{field: size})


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "a*a*a*a*$", "(.*)*x", "(a{1,9}){9}"])
def test_a_pattern_that_a_search_never_ends_with(pattern):
    with pytest.raises(UnsafeError, match="may take for ever"):
        cuts._finds(pattern, "a" * 60)


def test_a_pattern_that_is_none():
    with pytest.raises(CorruptError, match="universal_checkpoint_info"):
        cuts._finds("(", "a")


def test_a_tensor_on_one_rank_and_a_class_on_another():

    local = Local({1: contiguous("b.pt", 0, FLOAT32, whole((2,)), (2,))})
    with pytest.raises(CorruptError, match=r"a\.pt: 'w' is "):
        tree.join([{"w": Global("x.Y")}, {"w": local}], ["a.pt", "b.pt"])


def test_the_request_is_at_fault_where_a_device_is_given():
    with pytest.raises(UsageError):
        formats.read("/dev/zero")
