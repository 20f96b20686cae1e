"""The order of ranks in the meshes of DTensors: files of real DTensors, one for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard
from reshard.errors import UnsupportedError
from tests.support.process_groups import ranks

FULL = torch.arange(48.0).reshape(8, 6)


def save_ranks(folder: Path, order: list, placements: tuple, axis: str = "") -> None:
    """Save the file of each rank, whose shard is at its coordinate in the mesh or in an axis."""
    folder.mkdir()
    listed = torch.tensor(order)
    for rank in range(listed.numel()):
        with ranks(listed.numel(), rank):
            mesh = DeviceMesh("cpu", order, mesh_dim_names=("outer", "inner")[: listed.dim()])
            mesh = mesh[axis] if axis else mesh
            local = FULL
            for placement, at, size in zip(
                placements, mesh.get_coordinate(), mesh.shape, strict=True
            ):
                if isinstance(placement, Shard):
                    local = local.chunk(size, placement.dim)[at]
            weight = DTensor.from_local(local.clone(), mesh, placements, run_check=False)
            torch.save({"weight": weight}, folder / f"rank{rank}.pt")


@pytest.mark.parametrize(
    ("order", "placements", "axis"),
    [
        ([0, 1], (Shard(0),), ""),
        ([[0, 2], [1, 3]], (Shard(0), Shard(1)), ""),
        ([1, 0], (Replicate(),), ""),
        ([[1, 0], [3, 2]], (Shard(0), Replicate()), ""),
        ([[1, 0], [3, 2]], (Shard(0),), "outer"),
    ],
)
def test_ranks_that_ascend_where_they_shard_are_read(order, placements, axis, tmp_path):
    save_ranks(tmp_path / "run", order, placements, axis)
    out = tmp_path / "out.safetensors"
    reshard.merge(tmp_path / "run", out)
    assert torch.equal(load_file(out)["weight"], FULL)


@pytest.mark.parametrize(
    ("order", "placements", "axis", "named"),
    [
        ([1, 0], (Shard(0),), "", "(1, 0)"),
        ([2, 0, 1], (Shard(0),), "", "(2, 0, 1)"),
        ([[1, 0], [3, 2]], (Replicate(), Shard(1)), "", "(1, 0)"),
        ([[0, 3], [2, 1]], (Shard(0), Replicate()), "", "(3, 1)"),
        ([[1, 0], [3, 2]], (Shard(0),), "inner", "(1, 0)"),
    ],
)
def test_ranks_in_another_order_than_their_group_are_refused(
    order, placements, axis, named, tmp_path
):
    """Operations of torch take blocks by the order of the group, or by that of the mesh."""
    save_ranks(tmp_path / "run", order, placements, axis)
    out = tmp_path / "out.safetensors"
    with pytest.raises(UnsupportedError, match=r"rank\d\.pt") as refused:
        reshard.merge(tmp_path / "run", out)
    assert named in str(refused.value)
    assert not out.exists()
