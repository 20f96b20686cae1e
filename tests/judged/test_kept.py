"""Checkpoints of libraries that CI does not run: what each wrote, kept in ``tests/data``."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import reshard
from reshard.dcp import StorageReader
from reshard.errors import IncompleteError, StaleError, UnsupportedError
from tests.judged.expected import read_expected

DATA = Path(__file__).parents[1] / "data"
XLA = ["torch_xla/flat", "torch_xla/each", "torch_xla/trainer"]
WHOLE = ["composer", "nemo_rl", "olmo_core", *XLA]  # their optimizers' states are plain tensors
COMPUTED = ["torchao", "torchao_fsdp2", "torchao_4bit", "torchao_fp8"]  # theirs are codes


@pytest.mark.parametrize("library", [*WHOLE, *COMPUTED, "torch_xla/rows"])
def test_weights_are_merged_as_they_were(library, tmp_path):
    reshard.merge(DATA / library / "ckpt", tmp_path / "model.safetensors")
    got, want = load_file(tmp_path / "model.safetensors"), read_expected(DATA / library)["model"]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("library", WHOLE)
def test_the_optimizer_is_split_for_other_ranks(library, tmp_path):
    reshard.split(DATA / library / "ckpt", tmp_path / "out", to="dcp", world_size=3)
    want = read_expected(DATA / library)["state"]
    with reshard.open(tmp_path / "out") as checkpoint:
        for slot in ("exp_avg", "exp_avg_sq"):
            held = checkpoint.optimizer(slot)
            assert held.keys() == want.keys()
            for name, state in want.items():
                assert torch.equal(held[name][...], state[slot])
        steps = checkpoint.manifest.train.optimizer_step
        assert steps == {name: float(state["step"]) for name, state in want.items()}


DCP_KEPT = ["composer_fsdp2/ckpt/ep0-ba3", "torchtitan/titan_sample/ckpt/checkpoint/step-3"]


def test_composers_sharded_save_is_read_from_the_run(tmp_path):
    want = read_expected(DATA / "composer_fsdp2")
    with reshard.open(DATA / "composer_fsdp2" / "ckpt") as checkpoint:
        assert checkpoint.keys() == want["model"].keys()
        assert checkpoint.manifest.train.step == 3
        for name, state in want["state"].items():
            assert torch.equal(checkpoint[name][...], want["model"][name])
            assert torch.equal(checkpoint.optimizer("exp_avg_sq")[name][...], state["exp_avg_sq"])


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("path", DCP_KEPT)
def test_a_split_of_dcp_has_the_keys_and_objects_of_its_program(path, tmp_path):
    """The program's own loader looks for its keys, and reads objects that reshard does not know."""
    report = reshard.split(DATA / path, tmp_path / "out", world_size=3)
    assert not report.dropped
    assert not [note for note in report.notes if note.startswith("not copied")]
    before, after = (FileSystemReader(at).read_metadata() for at in (DATA / path, tmp_path / "out"))
    assert after.planner_data == before.planner_data
    assert list(after.planner_data) == list(before.planner_data)
    was, is_now = (
        _load_state_dict_from_keys(checkpoint_id=at) for at in (DATA / path, tmp_path / "out")
    )
    assert_equal_trees(is_now, was)
    cut = {
        len(about.chunks)
        for about in after.state_dict_metadata.values()
        if isinstance(about, TensorStorageMetadata) and about.size and about.size[0] == 3
    }
    assert cut == {3}


def test_a_split_to_dcp_by_name_has_documented_keys(tmp_path):
    report = reshard.split(DATA / DCP_KEPT[0], tmp_path / "out", to="dcp", world_size=3)
    assert any('the keys begin with "model" and "optim"' in note for note in report.notes)
    keys = FileSystemReader(tmp_path / "out").read_metadata().planner_data
    assert {path[0] for path in keys.values()} >= {"model", "optim"}


@pytest.mark.parametrize(("to", "optimizer"), [("dcp", "optim"), ("torch", "optimizer")])
def test_other_keys_than_the_scripts_are_named(to, optimizer, tmp_path):
    model = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(made, 2)
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        made.step()
        sched.step()
    state = {"net": model, "opt": made, "sched": sched}
    root = {name: each.state_dict() for name, each in state.items()}
    torch.save(root | {"iteration": 3}, tmp_path / "saved.pt")
    report = reshard.split(tmp_path / "saved.pt", tmp_path / "out", to=to)
    (note,) = [note for note in report.notes if "another name" in note]
    assert note.endswith(
        f": net -> model, opt -> {optimizer}, sched -> scheduler, iteration -> step"
    )
    again = reshard.split(tmp_path / "out", tmp_path / "again", to=to)
    assert not [note for note in again.notes if "another name" in note]


def assert_equal_trees(got, want):
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_equal_trees(got[key], value)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_equal_trees(one, other)
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, np.ndarray):
        assert np.array_equal(got, want)
    else:
        assert got == want


def test_composer_links_to_the_last_of_a_run():
    with reshard.open(DATA / "composer" / "ckpt") as checkpoint:
        warnings = checkpoint.manifest.warnings
        assert checkpoint.manifest.train.step == 3  # the batches in its timestamp
    assert warnings == ("other checkpoints of this directory were not read: ep0-ba2, ep0-ba3",)


def test_the_optimizer_of_rows_is_left_out_and_reported():
    with reshard.open(DATA / "torch_xla" / "rows" / "ckpt") as checkpoint:
        assert not checkpoint.manifest.has_optimizer
        assert any("it is left out" in warning for warning in checkpoint.manifest.warnings)


def test_the_metadata_of_torch_xla_state_the_rank(tmp_path):
    """Find files of another rank by the metadata, whatever the names of the files are."""
    for path in (DATA / "torch_xla" / "flat" / "ckpt").iterdir():
        shutil.copy(path, tmp_path / f"{path.stem.partition('-of-')[0]}.pth")
    first, second, last = sorted(tmp_path.iterdir())
    last.unlink()
    with pytest.raises(IncompleteError, match=r"ckpt_rank-00000002\.pth is missing"):
        reshard.open(tmp_path)
    shutil.copy(first, second)
    with pytest.raises(StaleError, match=f"{second.name}: has the tensors of rank 0, and so has"):
        reshard.open(tmp_path)


def test_olmo_core_keeps_a_learning_rate_in_a_tensor_for_each_parameter():
    with reshard.open(DATA / "olmo_core" / "ckpt") as checkpoint:
        groups = checkpoint.manifest.train.param_groups
    assert [(group.fqns, group.hyper["weight_decay"]) for group in groups] == [
        (("0.bias",), 0.0),
        (("0.weight", "1.weight"), 0.01),
    ]
    assert all(group.hyper["lr"] == torch.tensor(1e-3).item() for group in groups)


def assert_moments(path, library):
    """Compare moments and steps with those of the live optimizer, which torchao dequantised."""
    want = read_expected(DATA / library)["state"]
    with reshard.open(path) as checkpoint:
        for slot in ("exp_avg", "exp_avg_sq"):
            held = checkpoint.optimizer(slot)
            assert held.keys() == want.keys()
            for name, state in want.items():
                assert held[name].dtype == "float32"
                assert torch.equal(held[name][...], state[slot])
        steps = checkpoint.manifest.train.optimizer_step
    assert steps == {name: float(state["step"]) for name, state in want.items()}


@pytest.mark.parametrize("library", COMPUTED)
def test_torchaos_moments_are_dequantised(library, tmp_path):
    source, out = DATA / library / "ckpt", tmp_path / "out"
    assert any("codes of 8 or 4 bits" in note for note in reshard.inspect(source).manifest.warnings)
    assert_moments(source, library)
    reshard.split(source, out, to="deepspeed", zero_stage=2, world_size=3)
    assert_moments(out, library)


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_of_bitsandbytes_under_zero_are_dequantised(stage, tmp_path):
    """By its own ``dequantize_blockwise``; blocks begin with the ranks' partitions."""
    source, want = DATA / "bitsandbytes" / "ckpt", read_expected(DATA / "bitsandbytes")["state"]
    split = reshard.split(source, tmp_path / "out", zero_stage=stage, world_size=3)
    assert any("8 or 4 bits (bitsandbytes)" in note for note in split.warnings)
    key = "__bnb_optimizer_quant_state__"
    for path in (source, tmp_path / "out"):
        with reshard.open(path) as checkpoint:
            for slot in ("state1", "state2"):
                held = checkpoint.optimizer(f"{key}/{slot}")
                assert held.keys() == want.keys()
                for name, state in want.items():
                    assert torch.equal(torch.as_tensor(held[name][...]), state[slot])
            assert set(checkpoint.manifest.train.optimizer_step.values()) == {3}
    first = next((tmp_path / "out").rglob("*zero_pp_rank_0*optim_states.pt"))
    held = torch.load(first, weights_only=False)["optimizer_state_dict"]
    state = held["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"][0]
    assert type(state["step"]) is int  # a kernel of bitsandbytes takes no tensor
    assert state[key].keys() == {"state1", "state2"}


def test_reports_name_bitsandbytes_slots_as_adam_does(tmp_path):
    source, both = DATA / "bitsandbytes" / "ckpt", "exp_avg, exp_avg_sq"
    split = reshard.split(source, tmp_path / "out", world_size=3)
    assert any(line.startswith(f"{both};") for line in split.kept)
    verified = {check.name: check.looked_at for check in reshard.verify(source, deep=True).checks}
    assert verified["slots"] == f"{both} of 4 parameters"
    assert verified["moments"] == "exp_avg_sq of 4 tensors"
    assert not any("quant_state" in line for line in reshard.inspect(source).lines())
    with reshard.open(source) as checkpoint:
        stored = checkpoint.optimizer("__bnb_optimizer_quant_state__/state2")
        assert checkpoint.optimizer("exp_avg_sq").keys() == stored.keys()


def test_universal_has_no_moments_of_bitsandbytes(tmp_path):
    with pytest.raises(UnsupportedError, match="optimizer of bitsandbytes, which keeps codes"):
        reshard.split(DATA / "bitsandbytes" / "ckpt", tmp_path / "out", to="ds-universal")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_split_of_dcp_copies_codes_that_torchao_can_cut(ranks, tmp_path):
    """Two ranks have whole blocks of codes, as in the source; three would divide a block."""
    source, out, key = (
        DATA / "torchao_fp8" / "ckpt",
        tmp_path / "out",
        "optim.state.0.weight.exp_avg",
    )
    report = reshard.split(source, out, world_size=ranks)
    assert report.optimizer_tensors_in == report.optimizer_tensors_out > 0
    assert_moments(out, "torchao_fp8")
    was, is_now = (FileSystemReader(at).read_metadata() for at in (source, out))
    assert is_now.planner_data == was.planner_data
    stored = is_now.state_dict_metadata[key]
    assert len(stored.chunks) == ranks
    codes = [b"OptimStateFp8" in path.read_bytes() for path in sorted(out.glob("*.distcp"))]
    assert any(codes) == (ranks == 2)


def test_the_storage_reader_logs_the_warnings_of_its_source(caplog):
    source = DATA / "torchao_fp8" / "ckpt"
    warnings = reshard.inspect(source).manifest.warnings
    assert warnings
    StorageReader(source)
    assert [record.message for record in caplog.records] == list(warnings)
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("form", ["ckpt", "ranks"])
def test_weights_that_are_cast_in_training_are_read(form, tmp_path):
    """The classes of torchao's float8, int8 and BitNet training hold the weights uncast."""
    want = read_expected(DATA / "torchao_training")
    reshard.split(DATA / "torchao_training" / form, tmp_path / "out", to="dcp", world_size=3)
    for source in (DATA / "torchao_training" / form, tmp_path / "out"):
        with reshard.open(source) as checkpoint:
            assert checkpoint.keys() == want["model"].keys()
            for name, state in want["state"].items():
                assert torch.equal(checkpoint[name][...], want["model"][name])
                for slot in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(checkpoint.optimizer(slot)[name][...], state[slot])


def test_verl_fsdp1_wrapping_follows_from_its_config(tmp_path):
    """By transformers' own blocks, as verl does by default: no --wrap, and the moments are read."""
    actor = DATA / "verl" / "verl_sample" / "ckpt" / "global_step_3" / "actor"
    with reshard.open(actor) as found, reshard.open(actor, wrap="LlamaDecoderLayer") as told:
        for slot in ("exp_avg", "exp_avg_sq"):
            ours, wanted = found.optimizer(slot), told.optimizer(slot)
            assert ours.keys() == wanted.keys()
            assert len(ours) == 12
            assert all(torch.equal(ours[name][...], wanted[name][...]) for name in wanted)
    split = reshard.split(actor, tmp_path / "out", world_size=3)
    assert any("FSDP 1 becomes FSDP 2" in note for note in split.derived)
    assert (tmp_path / "out" / "huggingface" / "config.json").is_file()
    again = reshard.split(actor, tmp_path / "again", model=str(actor / "huggingface"), world_size=3)
    assert again.optimizer_tensors_out == split.optimizer_tensors_out == 24
    with reshard.open(actor) as found, reshard.open(tmp_path / "out") as written:
        held = written.optimizer("exp_avg")
        assert all(
            torch.equal(held[name][...], value[...])
            for name, value in found.optimizer("exp_avg").items()
        )
