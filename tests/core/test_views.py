"""Views of a tensor, against numpy: the same operations on the stored elements."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from reshard.core.box import Box, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import UINT8
from reshard.core.views import Permute, Put, Reshape, Take, append_view, apply_views, invert_views

INTS = np.arange(10_000)


def store(shape, pieces):
    """Return chunks of a tensor whose element i is at byte i, cut into random blocks."""
    boxes = [whole(shape)]
    for _ in range(pieces):
        box = boxes.pop(0)
        dim = max(range(len(shape)), key=lambda d: box.shape[d])
        half = box.shape[dim] // 2
        if half:
            left, right = list(box.shape), list(box.shape)
            left[dim], right[dim] = half, box.shape[dim] - half
            origin = list(box.origin)
            origin[dim] += half
            boxes += [Box(box.origin, tuple(left)), Box(tuple(origin), tuple(right))]
        else:
            boxes.append(box)
    flat = contiguous("f", 0, UINT8, whole(shape))
    for box in boxes:
        yield from (
            Chunk(box, "f", chunk.byte_offset, chunk.byte_strides, UINT8)
            for chunk in Take(shape, box).apply([flat])
        )


def fetch(chunks, shape):
    """Build the tensor of chunks over `INTS`; every element must be there once."""
    result = np.full(shape, -1)
    for chunk in chunks:
        block = np.lib.stride_tricks.as_strided(
            INTS[chunk.byte_offset :],
            chunk.box.shape,
            [stride * INTS.itemsize for stride in chunk.byte_strides],
        )
        place = chunk.box.slices
        assert (result[place] == -1).all()
        result[place] = block
    assert (result >= 0).all()
    return result


def random_view(rng, array):
    """Return a view, and the array under it."""
    kind = rng.choice(["take", "permute", "reshape", "put"])
    shape = array.shape
    if kind == "take":
        origin = tuple(rng.randrange(n) for n in shape)
        box = Box(origin, tuple(rng.randint(1, n - o) for n, o in zip(shape, origin, strict=True)))
        return Take(shape, box), array[box.slices]
    if kind == "permute":
        dims = tuple(rng.sample(range(len(shape)), len(shape)))
        return Permute(dims), array.transpose(dims)
    if kind == "put":
        return Put(shape, whole(shape)), array
    new = random_shape(rng, array.size)
    return Reshape(shape, new), array.reshape(new)


def random_shape(rng, numel):
    shape = []
    while numel > 1:
        factor = rng.choice([n for n in range(2, numel + 1) if numel % n == 0])
        shape.append(factor)
        numel //= factor
    shape.insert(rng.randint(0, len(shape)), 1)
    return tuple(shape)


@pytest.mark.parametrize("seed", range(150))
def test_chains_of_views_move_the_elements_that_numpy_moves(seed):
    rng = random.Random(seed)
    shape = random_shape(rng, rng.choice([12, 24, 30, 64, 36, 7, 1]))
    array = np.arange(prod(shape)).reshape(shape)
    chunks = list(store(shape, rng.randint(0, 4)))
    views, is_whole, last = (), True, array
    for _ in range(rng.randint(1, 5)):
        view, last = random_view(rng, last)
        is_whole = is_whole and not isinstance(view, Take)
        views = append_view(views, view)
    moved = list(apply_views(chunks, views))
    assert (fetch(moved, last.shape) == last).all()
    if is_whole:
        back = apply_views(moved, invert_views(views))
        assert (fetch(back, shape) == array).all()


def test_a_block_of_a_joined_tensor_is_taken_from_its_part():
    half = Put((4, 6), Box((2, 0), (2, 6)))
    assert append_view((half,), Take((4, 6), Box((0, 0), (2, 6)))) is None
    assert append_view((half,), Take((4, 6), Box((2, 0), (2, 6)))) == ()
    inner = append_view((half,), Take((4, 6), Box((1, 0), (2, 6))))
    assert inner == (Take((2, 6), Box((0, 0), (1, 6))), Put((2, 6), Box((1, 0), (1, 6))))


def test_interleaved_rows_stay_one_chunk_in_the_split_direction():
    [chunk] = store((8, 3), 0)
    views = (Reshape((8, 3), (4, 2, 3)), Permute((1, 0, 2)), Reshape((2, 4, 3), (8, 3)))
    assert len(list(apply_views([chunk], views))) == 2
    assert len(list(apply_views([chunk], invert_views(views)))) == 4


@pytest.mark.parametrize(("before", "after"), [((1, 6), (6,)), ((1, 6), (2, 3)), ((6, 1), (6,))])
def test_a_block_without_elements_stays_empty_in_another_shape(before, after):
    row = contiguous("f", 0, UINT8, whole(before))
    dim = before.index(1)
    origin, shape = [0, 0], list(before)
    origin[dim], shape[dim] = 1, 0  # what DCP lists for the second rank of one row
    empty = Chunk(Box(tuple(origin), tuple(shape)), "g", 0, row.byte_strides, UINT8)
    assert [chunk.file for chunk in Reshape(before, after).apply([row, empty])] == ["f"]
