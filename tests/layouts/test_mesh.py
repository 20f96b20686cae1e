"""A mesh's axes, and where they put a tensor: no element missing, and where torch has it."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.mesh import ROLES, MeshGrid, MeshPlacements, parse_mesh
from reshard.layouts.partition import Cut

NAMES = {"replicate": "dp_replicate", "shard": "dp_shard", "tensor": "tp"}
ORDERS = (("shard",), ("tensor",), ("replicate", "shard"), ("shard", "tensor"), tuple(NAMES))


@st.composite
def placings(draw):
    """Return a mesh and a tensor on it that tensor parallelism cuts, replicates or leaves alone."""
    roles = draw(st.sampled_from(ORDERS))
    sizes = draw(st.tuples(*(st.integers(1, 5) for _ in roles)))
    shape = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple))
    tensor = {}
    if "tensor" in roles and draw(st.booleans()):
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        tensor["w"] = None if dim is None else Cut(dim)
    return MeshPlacements(MeshGrid(sizes, tuple(NAMES[role] for role in roles)), tensor), shape


def cut_like_fully_shard(whole, cuts, sizes, at):
    """Return a rank's part; tensor parallelism cuts first, then `fully_shard` what it left.

    ``_compute_local_shape_and_global_offset`` of torch 2.13 is no oracle for strided shards: of 11
    rows on 5 x 2 ranks, it gives the part of one rank to another.
    """
    import torch

    part = whole
    strided_last = sorted(
        zip(cuts, sizes, at, strict=True),
        key=lambda axis: bool(axis[0] and axis[0].split_factor > 1),
    )
    for cut, size, place in strided_last:
        if cut:
            chunks = torch.chunk(part, size, cut.dim)
            part = chunks[place] if place < len(chunks) else part.narrow(cut.dim, 0, 0)
    return part


@given(placings())
@example((MeshPlacements(MeshGrid((5, 2), ("dp_shard", "tp")), {"w": Cut(0)}), (11,)))
def test_boxes_are_torchs_and_hold_every_element_equally_often(drawn):
    import torch

    placing, shape = drawn
    grid, placed = placing.grid, placing.get_placement("w")
    sizes = [grid.sizes[axis] for axis in placed.axes]
    whole, counts = torch.arange(prod(shape)).reshape(shape), np.zeros(shape, int)
    for rank in range(grid.world):
        at = [grid.locate(rank)[axis] for axis in placed.axes]
        box = grid.compute_box(shape, placed, rank)
        counts[box.slices] += 1
        part = cut_like_fully_shard(whole, placed.cuts, sizes, at)
        assert box.shape == tuple(part.shape)
        assert torch.equal(whole[box.slices], part)
    pairs = zip(placed.cuts, sizes, strict=True)
    assert (counts == grid.world // prod(size for cut, size in pairs if cut)).all()


def test_what_fully_shard_makes_of_each_parameter():
    """As torch 2.13 places them: see the judged tests, which ask it."""
    grid = MeshGrid((2, 4, 2), ("dp_replicate", "dp_shard", "tp"))
    placing = MeshPlacements(grid, {"columns": Cut(0), "rows": Cut(1), "bias": None})
    assert placing.get_placement("columns").cuts == (None, Cut(0, 2), Cut(0))
    assert placing.get_placement("rows").cuts == (None, Cut(0), Cut(1))
    assert placing.get_placement("bias").cuts == (None, Cut(0), None)
    assert (placing.get_placement("norm").axes, placing.get_placement("norm").cuts) == (
        (0, 1),
        (None, Cut(0)),
    )
    alone = MeshPlacements(MeshGrid((2,), ("tp",)), {"columns": Cut(0)})
    assert (alone.get_placement("columns").cuts, alone.get_placement("norm").axes) == (
        (Cut(0),),
        (),
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_a_group_has_the_ranks_that_differ_on_one_axis_alone(sizes):
    grid = MeshGrid(sizes)
    for axis in range(len(sizes)):
        groups = {}
        for rank in range(grid.world):
            groups.setdefault(grid.name_groups(rank)[axis], []).append(grid.locate(rank))
        for members in groups.values():
            assert [at[axis] for at in members] == list(range(sizes[axis]))
            assert len({at[:axis] + at[axis + 1 :] for at in members}) == 1


def test_a_mesh_is_read_as_it_is_written():
    grid = parse_mesh("dp_replicate=2, dp_shard=4,tp=2", "cpu")
    assert grid == MeshGrid((2, 4, 2), ("dp_replicate", "dp_shard", "tp"), "cpu")
    assert (grid.world, grid.size("tensor"), grid.size("shard", "replicate")) == (16, 2, 8)
    assert str(grid) == "dp_replicate=2,dp_shard=4,tp=2"
    assert [grid.locate(rank) for rank in (0, 1, 15)] == [(0, 0, 0), (0, 0, 1), (1, 3, 1)]
    for name in ROLES:
        if ROLES[name] != "replicate":
            assert parse_mesh(f"{name}=3", "cuda").sizes == (3,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not a mesh"),
        ("4", "is not a mesh"),
        ("dp=0", "is not a mesh"),
        ("dp=2;tp=2", "is not a mesh"),
        ("dp=2,", "is not a mesh"),
        ("x=2", "axis 'x' is not known"),
        ("dp=2,cp=2", "pass their product"),
        ("dp=2,fsdp=2", "has 2 axes that shard"),
        ("tp=2,dp=2", "write replicate before shard before tp"),
        ("dp_shard=2,dp_replicate=2", "write replicate before shard before tp"),
        ("ddp=2", "replicates but does not shard"),
        ("ddp=2,tp=2", "replicates but does not shard"),
    ],
)
def test_an_unclear_mesh_is_refused(text, told):
    with pytest.raises(UsageError, match=told):
        parse_mesh(text, "cpu")


def test_axes_without_names_do_nothing_that_is_known():
    with pytest.raises(UnsupportedError, match="a mesh of 2x2"):
        MeshPlacements(MeshGrid((2, 2))).get_placement("w")
