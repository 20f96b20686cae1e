"""Flat ranges of Megatron-core's parts, in the tensor's own shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from reshard.core.box import Box
from reshard.core.chunks import Chunk
from reshard.core.dtypes import FLOAT32
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats.dcp.flattened import restore
from reshard.state_dict.global_tensor import GlobalTensor

SHAPE, PARTS = (4, 6), (2, 2)
CUTS = (0, 1, 5, 6)  # of the 6 elements of a part


def stored(cuts=CUTS, parts=PARTS, numel=6):
    """Return chunks that follow one another in a file, part by part."""
    chunks, at = [], 0
    for number in np.ndindex(*parts):
        for start, stop in pairwise(cuts):
            box = Box((*number, start), (*(1 for _ in parts), stop - start))
            chunks.append(Chunk(box, "f", at, (4,) * (len(parts) + 1), FLOAT32))
            at += 4 * (stop - start)
    return GlobalTensor(FLOAT32, (*parts, numel), tuple(chunks))


@pytest.mark.parametrize("shape", [(4, 5), (4, 6, 1), (24,), (4, 12), ()])
def test_a_shape_that_has_no_such_parts(shape):
    with pytest.raises(CorruptError, match="cannot be divided into parts"):
        restore("m", "k", stored(), shape)


def test_a_range_that_leaves_its_part():
    with pytest.raises(CorruptError, match="places a range of 'k' at"):
        restore("m", "k", stored(cuts=(0, 4, 7)), SHAPE)


def test_a_range_with_gaps_between_its_elements():
    first, *others = stored(cuts=(0, 6)).chunks
    chunks = (replace(first, byte_strides=(4, 4, 8)), *others)
    with pytest.raises(UnsupportedError, match="gaps between its elements"):
        restore("m", "k", GlobalTensor(FLOAT32, (*PARTS, 6), chunks), SHAPE)
