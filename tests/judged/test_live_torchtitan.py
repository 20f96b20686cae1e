"""`reshard.torchtitan.CheckpointManager`: torchtitan's components go on from any checkpoint.

`./dev test` installs torchtitan into a folder of its own (`tests.judges.programs`).
"""

from __future__ import annotations

import re

import pytest
import torch

import reshard
from reshard.errors import IncompleteError
from tests.judges import server

pytestmark = pytest.mark.slow

JUDGE = server.Judge("tests.judges.torchtitan_worker", "torchtitan", {}, like=server.DEEPSPEED)
ACCELERATE = server.Judge("tests.judges.accelerate_worker", "Accelerate", {}, like=server.DEEPSPEED)
SAVED = 3  # as `accelerate_worker.SAVED`
NOISE = 1e-6  # absolute, of losses of about 4.6: another order of summing gradients
RESUMED = (("torchtitan", 4), ("torchtitan", 1), ("accelerate", 4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the path of each save, and what the run of torchtitan held and lost."""
    place = tmp_path_factory.mktemp("saved")
    (seen,) = JUDGE.run(place, {"torchtitan": (2, {})}).values()
    if isinstance(seen, server.Missing):
        pytest.skip(f"not made: {seen}")
    assert isinstance(seen, dict), seen
    (other,) = ACCELERATE.run(
        place, {"accelerate": (2, {"version": 2, "type": "SHARDED"})}
    ).values()
    assert isinstance(other, dict), other
    assert other["losses"] == pytest.approx(seen["losses"], abs=NOISE)
    checkpoint = place / "torchtitan/checkpoint" / f"step-{SAVED}"
    return {"torchtitan": checkpoint, "accelerate": place / "accelerate/saved"}, seen


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Return what each run held after it had resumed, and lost next."""
    place = tmp_path_factory.mktemp("resumed")
    jobs = {f"{name}-{ranks}": (ranks, {"resume": saved[0][name]}) for name, ranks in RESUMED}
    jobs["in_hf"] = (1, {"resume": saved[0]["accelerate"], "in_hf": True})
    return JUDGE.run(place, jobs)


@pytest.mark.parametrize(("name", "ranks"), RESUMED)
def test_torchtitan_continues(name, ranks, saved, resumed):
    got, wanted = resumed[f"{name}-{ranks}"], saved[1]
    assert isinstance(got, dict), got
    assert got["losses"] == pytest.approx(wanted["losses"][SAVED:], abs=NOISE)
    assert (got["step"], got["last_epoch"]) == (SAVED, SAVED)
    assert got["steps"] == wanted["steps"]
    for fqn, value in {**wanted["params"], **wanted["buffers"]}.items():
        assert torch.equal({**got["params"], **got["buffers"]}[fqn], value), fqn
    for fqn, slots in wanted["optimizer"].items():
        for slot, value in slots.items():
            assert torch.equal(got["optimizer"][fqn][slot], value), (fqn, slot)


def test_a_parameter_that_is_saved_in_parts(saved, tmp_path):
    """As in torchtitan's Llama 3: the optimizer names wqkv, the weights are wq, wk and wv."""
    (wanted,) = JUDGE.run(tmp_path / "saved", {"fused": (2, {"fused": True})}).values()
    source = tmp_path / "saved/fused/checkpoint" / f"step-{SAVED}"
    with pytest.raises(IncompleteError, match="torchtitan trains wqkv as one"):
        reshard.split(source, tmp_path / "other", to="fsdp2", world_size=3)
    reshard.split(source, tmp_path / "split", world_size=4)
    jobs = {
        "split": (4, {"fused": True, "resume": tmp_path / "split", "own": True}),
        "live": (1, {"fused": True, "resume": source}),
    }
    for got in JUDGE.run(tmp_path / "resumed", jobs).values():
        assert isinstance(got, dict), got
        assert got["losses"] == pytest.approx(wanted["losses"][SAVED:], abs=NOISE)
        assert torch.equal(got["params"]["qkv.wqkv.weight"], wanted["params"]["qkv.wqkv.weight"])
        for slot, value in wanted["optimizer"]["qkv.wqkv.weight"].items():
            assert torch.equal(got["optimizer"]["qkv.wqkv.weight"][slot], value)


def test_weights_go_through_the_adapter_of_the_model(saved, resumed):
    got, wanted = resumed["in_hf"], saved[1]
    assert isinstance(got, dict), got
    assert (got["step"], got["last_epoch"]) == (0, 0)
    for fqn, value in wanted["params"].items():
        assert torch.equal(got["params"][swap_layers(fqn)], value), fqn


def test_an_adapter_that_leaves_out_values(saved, tmp_path):
    """As that of torchtitan's GPT-OSS, whose experts have other names than in its adapter."""
    job = {"resume": saved[0]["accelerate"], "in_hf": True}
    jobs = {
        "buffer": (2, job | {"left_out": ["running"]}),
        "parameter": (2, job | {"left_out": ["odd", "running"]}),
    }
    got = JUDGE.run(tmp_path, jobs)
    buffers = saved[1]["buffers"]
    assert torch.equal(got["buffer"]["buffers"]["count"], buffers["count"])
    assert "leaves out 1 parameter of the model" in got["parameter"]
    assert "initialisation: odd" in got["parameter"]


def swap_layers(name):
    """Return the name that `torchtitan_worker.Renaming` gives a parameter: it swaps the layers."""
    return re.sub(r"layers\.(\d)", lambda match: f"layers.{1 - int(match[1])}", name)
