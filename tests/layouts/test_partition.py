"""Partition rules: every element is stored once, where the rule says."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
import pytest

from reshard.core import dtypes
from reshard.core.box import Box, flat_span, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import FLOAT32
from reshard.errors import UnsupportedError
from reshard.layouts.partition import (
    Cut,
    Member,
    build_flat_chunks,
    compute_equal_piece,
    compute_mesh_box,
    compute_packed_boxes,
    run_chunks,
)


def test_a_flat_tensor_with_gaps_is_refused():
    chunk = Chunk(whole((4,)), "rank0.pt", 0, (8,), FLOAT32)
    with pytest.raises(UnsupportedError, match=r"rank0\.pt: stores a flat tensor with gaps"):
        build_flat_chunks([Member("w", (4,), 0)], [(0, chunk)])


def test_run_chunks_point_at_the_run_stored_contiguously():
    chance = random.Random(1)
    for _ in range(1500):
        shape = tuple(chance.choice((0, 1, 2, 3, 5, 7)) for _ in range(chance.randint(0, 4)))
        start, stop = sorted(chance.randint(0, prod(shape)) for _ in range(2))
        lead = chance.randint(0, 9)
        tensor = np.arange(prod(shape), dtype="<u2").reshape(shape)
        stored = bytes(lead) + tensor.reshape(-1)[start:stop].tobytes()
        rebuilt, at = np.full(shape, 0xFFFF, "<u2"), start
        piece = contiguous("f", lead, dtypes.BFLOAT16, whole((stop - start,)))
        chunks = list(run_chunks(piece, 0, shape, start, stop))
        for chunk in chunks:
            low, high = chunk.byte_span
            assert (low, high) == (
                lead + 2 * (at - start),
                lead + 2 * (at - start) + 2 * chunk.box.volume,
            )
            assert flat_span(chunk.box, shape)[0] == at
            at += chunk.box.volume
            view = np.ndarray(chunk.box.shape, "<u2", stored, chunk.byte_offset, chunk.byte_strides)
            rebuilt[chunk.box.slices] = view
        assert at == stop
        flat = rebuilt.reshape(-1)
        assert flat[start:stop].tolist() == list(range(start, stop))
        assert (flat[:start] == 0xFFFF).all()
        assert (flat[stop:] == 0xFFFF).all()


def test_equal_pieces_are_those_of_torch_chunk():
    import torch

    for numel in range(1, 30):
        for ranks in range(1, 9):
            sizes = [len(piece) for piece in torch.arange(numel).chunk(ranks)]
            ours = [
                stop - start
                for start, stop in (compute_equal_piece(numel, ranks, r) for r in range(ranks))
            ]
            assert ours == sizes + [0] * (ranks - len(sizes))


def cases_on_meshes():
    """Return shapes, placements and meshes: plain, strided and replicated, uneven and empty."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    yield (7, 13), (2, 2), (Shard(0), Shard(1))
    yield (7, 13), (2, 2), (Shard(0), Shard(0))
    yield (10,), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))
    yield (3, 5), (4,), (Shard(0),)
    yield (3, 5), (2, 3), (Replicate(), Shard(1))
    yield (16, 4), (2, 2, 2), (_StridedShard(0, split_factor=2), Replicate(), Shard(0))
    yield (11, 4), (2, 3), (_StridedShard(0, split_factor=3), Shard(0))
    yield (
        (24,),
        (4, 3, 2),
        (
            _StridedShard(0, split_factor=2),
            _StridedShard(0, split_factor=2),
            Shard(0),
        ),
    )


def test_mesh_boxes_are_torchs():
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for shape, sizes, placements in cases_on_meshes():
        cuts = [
            None if isinstance(p, Replicate) else Cut(p.dim, getattr(p, "split_factor", 1))
            for p in placements
        ]
        for coordinate in product(*map(range, sizes)):
            wanted = _compute_local_shape_and_global_offset(
                shape, sizes, coordinate.__getitem__, placements
            )
            box = compute_mesh_box(shape, cuts, sizes, coordinate)
            assert box.shape == wanted[0], (shape, sizes, placements, coordinate)
            if box.volume:
                assert box.origin == wanted[1], (shape, sizes, placements, coordinate)


def test_split_factors_of_no_order_are_refused():
    assert compute_mesh_box((12,), [Cut(0, 5), Cut(0)], (2, 2), (0, 0)) is None


@pytest.mark.parametrize("shape", [(8, 3), (9, 5), (3, 4), (1, 1)])
def test_packed_boxes_are_torchs(shape):
    import torch
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    whole = torch.arange(prod(shape)).reshape(shape)
    for factor, ranks, dim in product((2, 3), (1, 2, 3), (0, 1)):
        cuts = [Cut(dim, factor), Cut(1 - dim)]
        rows, _ = _StridedShard(dim, split_factor=factor)._split_tensor(
            whole, ranks, with_padding=False
        )
        for rank, column in product(range(ranks), range(2)):
            wanted = Shard._custom_chunk(rows[rank], 2, 1 - dim)[column]
            stored = torch.full_like(wanted, -1)
            for box, at in compute_packed_boxes(shape, cuts, (ranks, 2), (rank, column)):
                stored[Box(at, box.shape).slices] = whole[box.slices]
            assert torch.equal(stored, wanted), (factor, ranks, dim, rank, column)
    assert compute_packed_boxes((12,), [Cut(0, 5), Cut(0)], (2, 2), (0, 0)) == []
    assert compute_packed_boxes((4, 3), [None, Cut(0, 2)], (2, 2), (1, 0)) == [
        (Box((0, 0), (1, 3)), (0, 0)),
        (Box((2, 0), (1, 3)), (1, 0)),
    ]


def test_flat_chunks_leave_padding_out():
    members = [Member("a", (2, 3), 0), Member("b", (4,), 8), Member("c", (), 12)]
    pieces = [(0, contiguous("f0", 100, FLOAT32, whole((7,))))]
    pieces += [(7, contiguous("f1", 0, FLOAT32, whole((9,))))]
    found = build_flat_chunks(members, pieces)
    assert [(c.box, c.file, c.byte_offset) for c in found["b"]] == [
        (Box((0,), (4,)), "f1", 4),
    ]
    assert [(c.box, c.byte_offset) for c in found["a"]] == [(whole((2, 3)), 100)]
    assert [c.byte_offset for c in found["c"]] == [20]
