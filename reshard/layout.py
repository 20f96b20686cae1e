"""Which elements of a tensor lie where: the partition rules that several formats share."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.box import Index, flat_span, row_major, run_boxes
from reshard.dtypes import DType
from reshard.manifest import Chunk


def run_chunks(
    file: str, byte_offset: int, dtype: DType, shape: Index, start: int, stop: int
) -> Iterator[Chunk]:
    """The run ``[start, stop)`` of a row-major tensor, stored contiguously from ``byte_offset``."""
    strides = row_major(shape, dtype.itemsize)
    for box in run_boxes(shape, start, stop):
        skipped = flat_span(box, shape)[0] - start
        yield Chunk(box, file, byte_offset + skipped * dtype.itemsize, strides, dtype)


def equal_piece(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The run that one rank owns when a tensor is cut into ``ceil(numel / ranks)`` elements a rank.

    The last ranks own less, or nothing.

    >>> [equal_piece(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-numel // ranks)
    return min(rank * step, numel), min((rank + 1) * step, numel)
