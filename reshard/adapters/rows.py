"""Rows of one tensor in place of rows of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from reshard.box import Box
from reshard.chunks import Chunk
from reshard.manifest import Entry
from reshard.views import Put, Take, apply_views


def replace_rows(base: Entry, rows: Entry, numbers: Sequence[int]) -> Entry:
    """Return ``base`` with some of its rows taken from another tensor.

    Args:
        rows: the new rows.
        numbers: where they belong, in their order; all different.
    """
    taken = sorted(numbers)
    chunks: list[Chunk] = []
    for before, after in pairwise([-1, *taken, base.shape[0]]):
        if after > before + 1:
            kept = _select_rows(base, before + 1, after)
            chunks += apply_views(base.chunks, [Take(base.shape, kept), Put(base.shape, kept)])
    for at, number in enumerate(numbers):
        taken_row, put_row = _select_rows(rows, at, at + 1), _select_rows(base, number, number + 1)
        chunks += apply_views(rows.chunks, [Take(rows.shape, taken_row), Put(base.shape, put_row)])
    return replace(base, chunks=tuple(chunks))


def _select_rows(entry: Entry, start: int, stop: int) -> Box:
    """Return the box of rows ``[start, stop)`` of a tensor."""
    rest = entry.shape[1:]
    return Box((start, *(0 for _ in rest)), (stop - start, *rest))
