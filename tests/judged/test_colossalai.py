"""ColossalAI's own files: whole tensors in shards, an optimizer by number beside them.

``tests/data/colossalai`` says how they were made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CorruptError, IncompleteError, UnsupportedError

KEPT = Path(__file__).parents[1] / "data" / "colossalai"
CASES = ("plain", "safetensors", "pipeline")


@pytest.fixture
def copied(tmp_path):
    def copy(case):
        return Path(shutil.copytree(KEPT / case / "ckpt", tmp_path / "ckpt"))

    return copy


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_those_of_the_live_objects(case):
    truth = torch.load(KEPT / case / "truth.pt")
    with reshard.open(KEPT / case / "ckpt") as checkpoint:
        assert set(checkpoint) == set(truth["weights"])
        for fqn, held in truth["weights"].items():
            assert torch.equal(torch.as_tensor(checkpoint[fqn][...]), held), fqn
        for fqn, slots in truth["state"].items():
            for slot in ("exp_avg", "exp_avg_sq"):
                found = torch.as_tensor(checkpoint.optimizer(slot)[fqn][...])
                assert torch.equal(found, slots[slot]), (slot, fqn)
        train = checkpoint.manifest.train
        assert [list(group.fqns) for group in train.param_groups] == truth["groups"]
        assert set(train.optimizer_step.values()) == {3.0}


def test_the_step_within_an_epoch_is_not_the_runs():
    with reshard.open(KEPT / "plain" / "ckpt") as checkpoint:
        train = checkpoint.manifest.train
    assert train.step is None
    assert train.client["running_states.json"]["sample_start_index"] == 12
    assert train.scheduler["last_epoch"] == 3


def test_stages_of_a_pipeline_are_counted_and_stand_in_order(copied):
    run = copied("pipeline")
    index = run / "pytorch_model.bin.index.json"
    about = json.loads(index.read_text())
    about["weight_map"] = dict(sorted(about["weight_map"].items(), key=lambda item: item[1][::-1]))
    index.write_text(json.dumps(about))  # as another order of os.listdir would have it
    with reshard.open(run) as checkpoint:
        assert checkpoint.manifest.origin.mesh == {"world": 2, "pp": 2}
        names = list(checkpoint)
    assert names.index("embed.weight") < names.index("down.weight")


@pytest.mark.parametrize("case", CASES)
def test_the_state_goes_to_other_layouts_and_stays_the_same(case, tmp_path):
    reshard.split(KEPT / case / "ckpt", tmp_path / "out", to="dcp", world_size=2)
    report = reshard.diff(KEPT / case / "ckpt", tmp_path / "out", kinds=["weights", "optimizer"])
    assert report.same, list(report.lines())


def test_the_weights_alone_are_a_hugging_face_directory(tmp_path):
    truth = torch.load(KEPT / "plain" / "truth.pt")["weights"]
    reshard.merge(KEPT / "plain" / "ckpt" / "modeling", tmp_path / "whole.pt")
    merged = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(merged[fqn], held) for fqn, held in truth.items())


@pytest.mark.parametrize(
    "name", ["pytorch_optim-00002.bin", "pytorch_optim_group.bin", "pytorch_model-00002.bin"]
)
def test_a_missing_file_is_named(copied, name):
    run = copied("plain")
    next(run.rglob(name)).unlink()
    with pytest.raises(IncompleteError, match=name):
        reshard.open(run)


def test_a_number_that_no_shard_holds_is_missed(copied):
    run = copied("plain")
    index = run / "optimizer" / "pytorch_optim.bin.index.json"
    about = json.loads(index.read_text())
    about["weight_map"]["99"] = "pytorch_optim-00001.bin"
    index.write_text(json.dumps(about))
    with pytest.raises(CorruptError, match="parameter 99"):
        reshard.open(run)


def test_an_optimizer_saved_asynchronously_is_refused(copied):
    run = copied("plain")
    index = run / "optimizer" / "pytorch_optim.bin.index.json"
    index.rename(index.with_name("optimizer.safetensors.index.json"))
    with pytest.raises(UnsupportedError, match="asynchronously"):
        reshard.open(run)
