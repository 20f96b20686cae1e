"""Checkpoints that training libraries wrote, against what the live objects held.

A case whose library cannot be imported here is skipped with the import's error.
"""

from __future__ import annotations

import os
import shutil

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import reshard
from reshard.errors import CorruptError, IncompleteError
from tests.judged.expected import read_expected
from tests.judges.library_cases import CASES
from tests.support.sample_tensors import same

READ = [name for name, case in CASES.items() if case.expect == "read"]
NAMED = [name for name in READ if CASES[name].slots]
ALSO = [(name, path) for name in READ for path in CASES[name].also]
HYPER = ("lr", "weight_decay", "betas", "eps")


@pytest.fixture
def expected(case, library_case):
    return read_expected(library_case(case))


@pytest.fixture(scope="module")
def checkpoint(case, library_case):
    """Open a case once for all tests of it."""
    with reshard.open(source(case, library_case), **options(case)) as opened:
        yield opened


def options(case):
    """Return the options that a user must pass because the files do not state them."""
    told = {"model": CASES[case].model, "wrap": CASES[case].wrap}
    return {option: value for option, value in told.items() if value is not None}


def source(case, library_case, path=None):
    return library_case(case) / "ckpt" / (path or CASES[case].source)


def check_weights(checkpoint, expected):
    wanted = expected["params"] | expected["buffers"]
    assert set(checkpoint) - set(expected["tied"]) == set(wanted)
    for name, value in wanted.items():
        assert same(checkpoint[name][...], value), name
    for alias, kept in expected["tied"].items():
        assert same(checkpoint[alias][...], wanted[kept]), alias


@pytest.mark.parametrize("case", READ, scope="module")
def test_weights_are_the_live_ones(case, checkpoint, expected):
    check_weights(checkpoint, expected)


@pytest.mark.parametrize(("case", "path"), ALSO)
def test_every_path_of_a_checkpoint_reads_the_same(case, path, library_case, expected):
    with reshard.open(source(case, library_case, path), **options(case)) as checkpoint:
        check_weights(checkpoint, expected)


@pytest.mark.parametrize("case", NAMED, scope="module")
def test_slots_are_the_live_ones(case, checkpoint, expected):
    wanted = expected["optimizer"]
    for slot in {slot for slots in wanted.values() for slot in slots}:
        held = checkpoint.optimizer(slot)
        assert set(held) == {name for name, slots in wanted.items() if slot in slots}
        for name in held:
            assert same(held[name][...], wanted[name][slot]), f"{slot} of {name}"


@pytest.mark.parametrize("case", [name for name in READ if not CASES[name].slots], scope="module")
def test_a_slot_without_a_certain_owner_is_not_assigned(case, checkpoint, expected):
    wanted = expected["optimizer"]
    for slot in {slot for slots in wanted.values() for slot in slots}:
        try:
            held = checkpoint.optimizer(slot)
        except reshard.errors.UsageError:
            continue
        for name in held:
            assert same(held[name][...], wanted[name][slot]), f"{slot} of {name}"


@pytest.mark.parametrize("case", NAMED, scope="module")
def test_train_state_is_the_live_one(case, checkpoint, expected):
    state = checkpoint.manifest.train
    assert dict(state.optimizer_step) == expected["steps"]
    assert state.step == expected["step"]
    if expected["scheduler"] is not None:
        assert last_epochs(state.scheduler) == last_epochs(expected["scheduler"])
        assert last_epochs(state.scheduler)
    if expected.get("scaler") is not None:
        assert state.scaler["scale"] == expected["scaler"]["scale"]


def last_epochs(scheduler):
    """Return the epochs in a state, or in a list of states, as libraries keep them."""
    if isinstance(scheduler, dict):
        return [scheduler["last_epoch"]] if "last_epoch" in scheduler else []
    return [epoch for each in scheduler for epoch in last_epochs(each)]


@pytest.mark.parametrize("case", NAMED, scope="module")
def test_groups_are_the_live_ones(case, checkpoint, expected):
    wanted = {frozenset(g["params"]): g for g in expected["groups"] if g["params"]}
    groups = checkpoint.manifest.train.param_groups
    found = {frozenset(group.fqns): group.hyper for group in groups if group.fqns}
    assert found.keys() == wanted.keys()
    for names, hyper in found.items():
        for key in HYPER:
            got, want = hyper[key], wanted[names][key]
            assert (list(got) if key == "betas" else got) == (
                list(want) if key == "betas" else want
            ), key


@pytest.mark.parametrize("case", READ, scope="module")
def test_merge_keeps_every_byte(case, library_case, expected, tmp_path):
    out = tmp_path / "x.safetensors"
    report = reshard.merge(source(case, library_case), out, dtype="keep", **options(case))
    merged = load_file(out)
    wanted, tied = expected["params"] | expected["buffers"], expected["tied"]
    assert merged.keys() - tied.keys() == wanted.keys()
    for name, value in merged.items():  # a tied copy that no file calls tied is kept
        assert same(value, wanted[tied.get(name, name)]), name
    assert report.verified
    assert report.dropped_aliases.items() <= tied.items()
    assert not report.dropped_aliases.keys() & merged.keys()


@pytest.mark.parametrize("case", [n for n, c in CASES.items() if c.expect == "refused"])
def test_refused_checkpoints_leave_no_output(case, library_case, tmp_path):
    with pytest.raises(reshard.ReshardError):
        reshard.merge(source(case, library_case), tmp_path / "x.safetensors", **options(case))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "case", ["lit_fsdp_sharded", "lit_fsdp2_sharded", "lit_fabric_fsdp_sharded", "titan_sample"]
)
def test_a_split_keeps_the_keys_of_dcp_and_the_files_beside(case, library_case, expected, tmp_path):
    place = source(case, library_case)
    report = reshard.split(place, tmp_path / "out", world_size=3)
    assert not report.dropped
    keys = [FileSystemReader(at).read_metadata().planner_data for at in (place, tmp_path / "out")]
    assert keys[0] == keys[1]
    if case.startswith("lit"):
        assert (tmp_path / "out/meta.pt").read_bytes() == (place / "meta.pt").read_bytes()
    with reshard.open(tmp_path / "out") as checkpoint:
        check_weights(checkpoint, expected)
        assert (
            checkpoint.manifest.train.scheduler == reshard.inspect(place).manifest.train.scheduler
        )


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("acc_two_models", ("model", "model_1")),
        ("acc_fsdp2_two_models", ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1")),
    ],
)
def test_each_of_two_models_has_its_own_scheduler(case, names, library_case):
    place = source(case, library_case)
    for key, own in zip(names, ("lr_lambdas", "step_size"), strict=True):
        with reshard.open(place, key=key) as checkpoint:
            assert own in checkpoint.manifest.train.scheduler
            assert "scheduler.bin" in checkpoint.manifest.train.kept_files
            assert "scheduler_1.bin" not in checkpoint.manifest.train.kept_files


def test_a_lost_optimizer_is_noticed_by_its_scheduler(library_case, tmp_path):
    for case, name in (("acc_single", "optimizer.bin"), ("trainer_single", "optimizer.pt")):
        shutil.copytree(source(case, library_case), tmp_path / case)
        lost = "a scheduler was saved, but the file of its optimizer is missing"
        assert lost not in reshard.inspect(tmp_path / case).manifest.warnings
        (tmp_path / case / name).unlink()
        assert lost in reshard.inspect(tmp_path / case).manifest.warnings


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_weights_are_read_beside_a_damaged_optimizer(damage, library_case, tmp_path):
    case = "acc_fsdp1_sharded"
    shutil.copytree(source(case, library_case), tmp_path / "run")
    weights = tmp_path / "run/pytorch_model_fsdp_0"
    part = tmp_path / "run/optimizer_0/__1_0.distcp"
    part.unlink() if damage == "missing" else os.truncate(part, 2000)
    for path in (tmp_path / "run", weights):
        with pytest.raises((IncompleteError, CorruptError)) as caught:
            reshard.inspect(path)
        assert f"only the weights: --from torch {weights}" in caught.value.remedy
    with reshard.open(weights, source_format="torch") as found:
        check_weights(found, read_expected(library_case(case)))


def test_a_note_states_that_adapters_are_not_merged(library_case, tmp_path):
    report = reshard.merge(library_case("peft_lora") / "ckpt", tmp_path / "out.safetensors")
    assert any("8 LoRA tensors" in text for text in report.warnings)
