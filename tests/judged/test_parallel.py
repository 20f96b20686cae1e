"""Model-parallel checkpoints of real DeepSpeed, against what its ranks gathered in training."""

from __future__ import annotations

import pytest
import torch

import reshard
from tests.judged.conftest import KEPT
from tests.judges.parallel_cases import CASES

pytestmark = pytest.mark.judge
SLOTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="session")
def made(checkpoints):
    """A directory with a folder a case: ``run/`` and ``reference.pt``."""
    from tests.judges import parallel_judge

    return checkpoints(parallel_judge.make_all, list(CASES), "parallel")


def reference_of(place):
    return torch.load(place / "reference.pt", weights_only=False)


def check(checkpoint, reference):
    """All that the ranks held is there, bitwise, and nothing else."""
    full = {**reference["live"], **reference["buffers"], **reference["params"]}
    assert set(checkpoint) == set(full)
    for name, value in full.items():
        got = checkpoint[name][...]
        assert got.shape == value.shape, name
        assert torch.equal(got.to(value.dtype), value), name
    for slot in SLOTS:
        held = checkpoint.optimizer(slot)
        assert set(held) == set(reference[slot]), slot
        for name, value in reference[slot].items():
            assert torch.equal(held[name][...], value), f"{slot} of {name}"


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_held_is_read(case, made):
    reference = reference_of(made / case)
    with reshard.open(made / case / "run") as checkpoint:
        check(checkpoint, reference)
        state, mesh = checkpoint.manifest.train, checkpoint.manifest.origin.mesh
    row = CASES[case]
    assert (mesh["tp"], mesh["pp"], mesh["dp"]) == (row.tp, row.pp, row.dp)
    assert state.step == len(reference["losses"])
    assert set(state.optimizer_step.values()) == {float(state.step)}
    trained = [fqn for group in state.param_groups for fqn in group.fqns]
    assert sorted(trained) == sorted(reference["params"])
    for group, wanted in zip(state.param_groups, reference["groups"], strict=True):
        assert group.hyper["weight_decay"] == wanted["weight_decay"]


def test_megatron_deepspeeds_own_checkpoint_is_read():
    """A tied GPT of Megatron-DeepSpeed, which ds_to_universal made whole; the vocabulary's padding
    is cut off there."""
    place = KEPT / "megatron_deepspeed" / "tp2pp2dp2"
    reference = reference_of(place)
    with reshard.open(place / "run") as checkpoint:
        assert set(checkpoint) == set(reference["params"])
        for name, value in reference["params"].items():
            assert torch.equal(checkpoint[name][: len(value)], value), name
        for slot in SLOTS:
            for name, value in reference[slot].items():
                assert torch.equal(checkpoint.optimizer(slot)[name][: len(value)], value), name
        manifest = checkpoint.manifest
    assert manifest.origin.mesh == {"world": 8, "dp": 2, "tp": 2, "pp": 2}
    (told,) = [text for text in manifest.warnings if "position_embeddings" in text]
    assert "is taken from the first stage" in told
