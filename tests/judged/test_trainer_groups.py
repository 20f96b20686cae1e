"""Numbered optimizers of the real Trainer whose shapes alone do not name the parameters.

A Mamba has vectors of one shape in both param groups, and a plain SGD has no state with a shape.
The rule by which the Trainer makes its groups decides.
"""

from __future__ import annotations

import pytest

import reshard
from reshard.errors import IncompleteError
from tests.judged.alike import assert_resumed_state, assert_same_state
from tests.judged.trained import JUDGE, SAVED, train
from tests.support.sample_tensors import same

pytestmark = pytest.mark.slow

MAMBA = {"kind": "ddp", "family": "mamba"}
RUNS = {
    "adam": MAMBA,
    "sgd": {**MAMBA, "optim": "sgd"},
    "frozen": {**MAMBA, "family": "frozen mamba"},
}
ZERO_0 = {**MAMBA, "kind": "deepspeed", "stage": 0, "optimizer": "trainer", "scheduler": "trainer"}
MODELS = {"frozen": {"model": "tests.judges.resume_worker:frozen_mamba"}}
WORLDS = (2, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train the real runs; return name -> the checkpoint, and the run's state and losses."""
    return train(tmp_path_factory.mktemp("saved"), {**RUNS, "zero 0": ZERO_0})


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Resume each output; return the state of the real Trainer then, and its next losses."""
    place, jobs = tmp_path_factory.mktemp("written"), {}
    for name, told in RUNS.items():
        for world in WORLDS:
            out = place / f"{name} {world}"
            reshard.split(saved[name][0], out, world_size=world, **MODELS.get(name, {}))
            jobs[name, world] = world, {**told, "resume": out / f"checkpoint-{SAVED}"}
    found = JUDGE.run(
        tmp_path_factory.mktemp("resumed"), {" ".join(map(str, k)): v for k, v in jobs.items()}
    )
    return {key: found[" ".join(map(str, key))] for key in jobs}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", RUNS)
def test_the_rule_of_the_trainer_names_the_parameters(name, world, saved, resumed):
    seen, expected = resumed[name, world], saved[name][1]
    assert_resumed_state(seen, expected, SAVED)
    for group, wanted in zip(seen["groups"], expected["groups"], strict=True):
        assert group["params"] == wanted["params"]
        assert group["weight_decay"] == wanted["weight_decay"]
    if world == 2:
        assert seen["losses"] == expected["losses"]


def test_stage_0_of_deepspeed_numbers_them_as_well(saved, tmp_path):
    source, expected = saved["zero 0"]
    with reshard.open(source) as checkpoint:
        for fqn, slots in expected["optimizer"].items():
            assert same(checkpoint.optimizer("exp_avg")[fqn][...], slots["exp_avg"]), fqn
    copy = tmp_path / "global_step3"  # without the Trainer's files, nothing says who made it
    copy.mkdir()
    for path in (source / "global_step3").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(IncompleteError, match="in several groups") as caught:
        reshard.split(copy, tmp_path / "out", world_size=1)
    assert "named_parameters" in caught.value.remedy
    assert "--model" not in caught.value.remedy


def test_a_model_whose_frozen_parameters_are_unknown_is_refused(saved, tmp_path):
    """The advice asks for it, and ends."""
    source = saved["frozen"][0]
    with pytest.raises(IncompleteError, match="some of them are frozen") as caught:
        reshard.split(source, tmp_path / "out", world_size=1)
    assert "with these frozen" in caught.value.remedy


def test_groups_that_are_not_the_trainers_are_refused(saved, tmp_path):
    """Without the Trainer's own file, nothing says who made the groups."""
    copy = tmp_path / "checkpoint-3"
    copy.mkdir()
    for path in saved["adam"][0].iterdir():
        if path.name != "trainer_state.json":
            (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(IncompleteError, match="in several groups"):
        reshard.split(copy, tmp_path / "out", world_size=1, to="accelerate")


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_folder_of_dcp_stands_for_its_checkpoint(folder, saved, tmp_path):
    """The weights alone would lose the optimizer beside them, and no one would be told."""
    reshard.split(saved["adam"][0], tmp_path / "out", state_dict_type="sharded")
    whole = tmp_path / "out" / f"checkpoint-{SAVED}"
    with reshard.open(whole) as wanted, reshard.open(whole / folder) as found:
        assert_same_state(found, wanted)
        assert found.manifest.train.step == SAVED
    (whole / "pytorch_model_fsdp_1").mkdir()
    for path in (whole / "pytorch_model_fsdp_0").iterdir():
        (whole / "pytorch_model_fsdp_1" / path.name).write_bytes(path.read_bytes())
    with reshard.open(whole / "pytorch_model_fsdp_1") as second:  # one of two models is chosen
        assert not second.manifest.has_optimizer
