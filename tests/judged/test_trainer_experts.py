"""The real Trainer continues mixtures of experts from what reshard writes.

transformers 5 saves such a model under published names, which differ from those in memory. The
Trainer loads its own checkpoint by the names in memory, so it cannot resume the experts of its own
DDP checkpoints (transformers issue 48805). Each case here is resumed at other ranks or in another
layout, and its next losses are those of the run that was never interrupted.
"""

from __future__ import annotations

import pytest

import reshard
from tests.judged.alike import assert_resumed_state
from tests.judged.trained import JUDGE, SAVED, train

FSDP2 = {"kind": "fsdp2", "type": "SHARDED_STATE_DICT"}
RUNS = {  # name -> how the Trainer trains and saves at two ranks
    "mixtral ddp": {"kind": "ddp", "family": "mixtral"},
    "qwen3 ddp": {"kind": "ddp", "family": "qwen3_moe"},
    "qwen3 fsdp2": {**FSDP2, "family": "qwen3_moe"},
}
RESUMED = {  # name -> the run, the ranks, how it is written, how the Trainer resumes
    "mixtral ddp at 2": ("mixtral ddp", 2, {}, {"kind": "ddp"}),
    "mixtral ddp as fsdp2": ("mixtral ddp", 2, {"state_dict_type": "sharded"}, FSDP2),
    "qwen3 ddp at 2": ("qwen3 ddp", 2, {}, {"kind": "ddp"}),
    "qwen3 ddp as fsdp2": ("qwen3 ddp", 2, {"state_dict_type": "sharded"}, FSDP2),
    "qwen3 ddp at 1": ("qwen3 ddp", 1, {"rng": "derive"}, {"kind": "one"}),
    "qwen3 fsdp2 at 4": ("qwen3 fsdp2", 4, {"rng": "derive"}, FSDP2),
    "qwen3 fsdp2 as ddp": ("qwen3 fsdp2", 2, {"state_dict_type": "unsharded"}, {"kind": "ddp"}),
}
SAME_RANKS = [name for name, (_, ranks, _, _) in RESUMED.items() if ranks == 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train the real runs; return name -> the checkpoint, and the run's state and losses."""
    return train(tmp_path_factory.mktemp("saved"), RUNS)


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Resume each output; return the state of the real Trainer then, and its next losses."""
    place = tmp_path_factory.mktemp("written")
    jobs = {}
    for name, (run, ranks, how, resumes) in RESUMED.items():
        reshard.split(saved[run][0], place / name, to="hf-trainer", world_size=ranks, **how)
        told = {**resumes, "family": RUNS[run]["family"], "resume": place / name / "checkpoint-3"}
        jobs[name] = ranks, told
    return JUDGE.run(tmp_path_factory.mktemp("resumed"), jobs)


@pytest.fixture(scope="module")
def live(saved, tmp_path_factory):
    """Resume without files: the Trainer reads what `split` would have written."""
    jobs = {}
    for name, (run, ranks, how, resumes) in RESUMED.items():
        options = {key: how[key] for key in ("rng",) if key in how}
        told = {**resumes, "family": RUNS[run]["family"], "resume": saved[run][0]}
        jobs[name] = ranks, {**told, "live": options}
    return JUDGE.run(tmp_path_factory.mktemp("live"), jobs)


@pytest.mark.parametrize("name", RESUMED)
def test_the_trainer_resumes_experts_with_every_bit(name, resumed, saved):
    assert_resumed_state(resumed[name], saved[RESUMED[name][0]][1], SAVED)


@pytest.mark.parametrize("name", RESUMED)
def test_the_trainer_resumes_experts_without_files(name, live, resumed, saved):
    assert_resumed_state(live[name], saved[RESUMED[name][0]][1], SAVED)
    assert live[name]["losses"] == resumed[name]["losses"]
    assert not [text for text in live[name]["warnings"] if "FSDP 1" in text]


@pytest.mark.parametrize("name", SAME_RANKS)
def test_its_losses_are_those_of_the_unbroken_run(name, resumed, saved):
    wanted = saved[RESUMED[name][0]][1]["losses"]
    assert resumed[name]["losses"] == pytest.approx(wanted, rel=1e-6)
