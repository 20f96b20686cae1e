"""Geometry of blocks in a logical tensor, in elements, never in bytes.

A box is ``tensor[o0:o0+s0, o1:o1+s1, ...]``. A run ``[start, stop)`` is an interval of the
row-major flattened tensor, as flat partitions (ZeRO, FSDP flat parameters) store it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

Index = tuple[int, ...]

MAX_DIMS = 64  # torch's own limit
_MAX_NUMEL = 1 << 63


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: its first index and its extent, in elements, one number per dim."""

    origin: Index
    shape: Index

    @property
    def volume(self) -> int:
        """The number of elements; a 0-d box has one."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the block in the tensor.

        >>> Box((1, 0), (2, 2)).slices
        (slice(1, 3, None), slice(0, 2, None))
        """
        return tuple(slice(o, o + n) for o, n in zip(self.origin, self.shape, strict=True))

    def within(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``; ``b.within(b)`` starts at zero."""
        return Box(tuple(a - b for a, b in zip(self.origin, outer.origin, strict=True)), self.shape)

    def shift(self, by: Sequence[int]) -> Box:
        """Return this box moved by a number of elements in each dim; it undoes `within`.

        >>> Box((1, 0), (2, 2)).shift((3, 4))
        Box(origin=(4, 4), shape=(2, 2))
        """
        return Box(tuple(a + b for a, b in zip(self.origin, by, strict=True)), self.shape)

    def shift_rows(self, rows: int) -> Box:
        """Return this box moved by a number of elements in the first dim."""
        return Box((self.origin[0] + rows, *self.origin[1:]), self.shape)

    def is_run(self, shape: Sequence[int]) -> bool:
        """Return whether the box is a run of the flattened tensor of this shape."""
        start, stop = flat_span(self, shape)
        return stop - start == self.volume

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the box is inside a tensor of this shape."""
        return len(self.shape) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n
            for o, s, n in zip(self.origin, self.shape, shape, strict=True)
        )


def as_index(numbers: Iterable[Any], dims: int | None = None) -> Index:
    """Return a shape, origin or extent from a file, if a tensor can have it.

    Raises:
        ValueError: a number is not an integer of at least 0, there are more dims than torch
            supports, or not ``dims`` of them.
    """
    index = tuple(numbers)
    sane = len(index) <= MAX_DIMS and all(type(n) is int and 0 <= n < _MAX_NUMEL for n in index)
    if not sane or prod(index) >= _MAX_NUMEL or (dims is not None and len(index) != dims):
        numbers_shown = [n if type(n) is int else type(n).__name__ for n in index[: MAX_DIMS + 1]]
        raise ValueError(f"{numbers_shown!s:.60} is not a shape or index of a tensor")
    return index


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers the full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int], unit: int = 1) -> Index:
    """Return the strides of a contiguous tensor, in multiples of ``unit`` (1, or bytes).

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = unit
    for extent in reversed(shape):
        strides.append(step)
        # As in torch, an empty dim counts as 1, so that no stride is 0.
        step *= max(extent, 1)
    return tuple(reversed(strides))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common block of two boxes, or None; ``intersect(a, a) == a``.

    Empty boxes intersect nothing.
    """
    origin = []
    shape = []
    for a0, an, b0, bn in zip(a.origin, a.shape, b.origin, b.shape, strict=True):
        start = max(b0, a0)
        stop = min(a0 + an, b0 + bn)
        if stop <= start:
            return None
        origin.append(start)
        shape.append(stop - start)
    return Box(tuple(origin), tuple(shape))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes of the run ``[start, stop)``, in row-major order: at most ``2 * ndim - 1``.

    >>> run_boxes((3, 4), 2, 9)
    [Box(origin=(0, 2), shape=(1, 2)), Box(origin=(1, 0), shape=(1, 4)), \
Box(origin=(2, 0), shape=(1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    boxes = []
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [_under(first, box) for box in run_boxes(shape[1:], head, tail)]
    if head:
        boxes += [_under(first, box) for box in run_boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((first, *zeros), (last - first, *shape[1:])))
    if tail:
        boxes += [_under(last, box) for box in run_boxes(shape[1:], 0, tail)]
    return boxes


def _under(row: int, box: Box) -> Box:
    return Box((row, *box.origin), (1, *box.shape))


def flat_span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the smallest run ``[start, stop)`` of a tensor of this shape that contains the box."""
    strides = row_major(shape)
    start = sum(o * s for o, s in zip(box.origin, strides, strict=True))
    if box.volume == 0:
        return start, start
    return start, 1 + start + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))


def index_of(flat: int, shape: Sequence[int]) -> Index:
    """Return the index of an element from its position in the row-major flattened tensor.

    >>> index_of(7, (2, 5))
    (1, 2)
    """
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def contiguous_cuts(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``limit`` elements, each one run, in row-major order."""
    if prod(shape) <= limit or not shape:
        if prod(shape):
            yield whole(shape)
        return
    row = prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for box in contiguous_cuts(shape[1:], limit):
                yield _under(index, box)
        return
    step = limit // row
    zeros = (0,) * (len(shape) - 1)
    for index in range(0, shape[0], step):
        yield Box((index, *zeros), (min(step, shape[0] - index), *shape[1:]))


def find_first_overlap(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None.

    Sorting is enough if the flat spans are disjoint, as in flat partitions (``n log n``). Boxes
    whose spans interleave (column shards) are swept along the dim that separates them best.
    """
    solid = [i for i, box in enumerate(boxes) if box.volume]
    spans = sorted((*flat_span(boxes[i], shape), i) for i in solid)
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        return None
    if not shape:  # all boxes of a 0-d tensor are its only element
        return solid[0], solid[1]
    dim = max(range(len(shape)), key=lambda d: len({boxes[i].origin[d] for i in solid}))
    order = sorted(solid, key=lambda i: (boxes[i].origin[dim], i))
    active: list[int] = []
    for i in order:
        start = boxes[i].origin[dim]
        active = [j for j in active if boxes[j].origin[dim] + boxes[j].shape[dim] > start]
        for j in active:
            if intersect(boxes[i], boxes[j]):
                return min(i, j), max(i, j)
        active.append(i)
    return None
