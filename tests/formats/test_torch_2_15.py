"""Read what two ranks of torch 2.15 saved: strides in `.metadata`, parts of tensors, a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
import reshard.dcp
from tests.judged.expected import read_expected
from tests.support.directories import unpack
from tests.support.installed import TORCH_2_6

PACKED = Path(__file__).parents[1] / "data" / "torch_2.15" / "ws2.tar.xz"


@pytest.fixture
def saved(tmp_path):
    return unpack(PACKED, tmp_path / "saved")


def assert_held(path, want, table=None):
    """Assert that a checkpoint has the weights and moments of the live FSDP 2 model."""
    with reshard.open(path) as checkpoint:
        moments = checkpoint.optimizer("exp_avg_sq")
        for name, value in want["model"].items():
            assert torch.equal(checkpoint[name][...], value)
            assert torch.equal(moments[name][...], want["exp_avg_sq"][name])
        assert ("table" in checkpoint) == (table is not None)
        if table is not None:
            assert torch.equal(checkpoint["table"][...], table)
            assert torch.equal(checkpoint["columns"][...], torch.arange(6.0).view(2, 3).t())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_its_dcp_becomes_one_that_older_versions_load(saved, tmp_path):
    """Their ``TensorProperties`` take five fields, and torch 2.15 pickles six."""
    want = read_expected(saved)
    assert_held(saved / "dcp", want, want["table"])
    reshard.split(saved / "dcp", tmp_path / "out", world_size=2)
    assert_held(tmp_path / "out", want, want["table"])
    state = {"model": {"table": torch.zeros(8, 3), "0.weight": torch.zeros(5, 3)}}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    assert torch.equal(state["model"]["table"], want["table"])
    assert torch.equal(state["model"]["0.weight"], want["model"]["0.weight"])


def test_shards_of_a_mesh_in_another_order_are_put_in_their_places(saved, tmp_path):
    want = read_expected(saved)
    assert_held(saved / "ranks", want)
    reshard.split(saved / "ranks", tmp_path / "out", world_size=3)
    assert_held(tmp_path / "out", want)
    if not TORCH_2_6:  # it has no class _MeshLayout
        meshes = {torch.load(path)["0.weight"].device_mesh for path in tmp_path.glob("out/model_*")}
        assert {mesh._preserve_rank_order for mesh in meshes} == {False}  # torch 2.15 compares it


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch 2.15 loads parts of tensors"
)
def test_the_parts_of_a_tensor_are_loaded_into_a_padded_one(saved):
    want = torch.full((6, 3), -1.0)
    want[0:2], want[3:5] = read_expected(saved)["table"][2:4], read_expected(saved)["table"][6:8]
    target = torch.full((6, 3), -1.0)
    target.global_shape, target.local_sizes = (8, 3), ((2, 3), (2, 3))
    target.global_offsets, target.local_offsets = ((2, 0), (6, 0)), ((0, 0), (3, 0))
    reader = reshard.dcp.StorageReader(saved / "dcp")
    dcp.load({"model": {"table": target}}, storage_reader=reader)
    assert torch.equal(target, want)
