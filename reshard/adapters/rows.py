"""Rows of one tensor in place of rows of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from reshard.box import Box, Index, intersect
from reshard.chunks import Chunk
from reshard.manifest import Entry


def replace_rows(base: Entry, rows: Entry, numbers: Sequence[int]) -> Entry:
    """Return ``base`` with some of its rows taken from another tensor.

    Args:
        rows: the new rows.
        numbers: where they belong, in their order; all different.
    """
    taken = sorted(numbers)
    chunks: list[Chunk] = []
    for before, after in pairwise([-1, *taken, base.shape[0]]):
        chunks += take_rows(base, before + 1, after, before + 1)
    for at, number in enumerate(numbers):
        chunks += take_rows(rows, at, at + 1, number)
    return replace(base, chunks=tuple(chunks))


def take_rows(entry: Entry, start: int, stop: int, first: int) -> Iterator[Chunk]:
    """Yield the chunks of rows ``[start, stop)``, as rows from ``first`` on."""
    rest = entry.shape[1:]
    box = Box((start, *(0 for _ in rest)), (stop - start, *rest))
    for chunk in entry.chunks:
        common = intersect(box, chunk.box)
        if common is None:
            continue
        inside = common.within(chunk.box).origin
        skipped = sum(at * stride for at, stride in zip(inside, chunk.byte_strides, strict=True))
        moved: Index = (common.origin[0] - start + first, *common.origin[1:])
        yield replace(chunk, box=Box(moved, common.shape), byte_offset=chunk.byte_offset + skipped)
