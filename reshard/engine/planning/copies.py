"""Strided copies: which blocks of the source files fill a given box of a tensor.

A `Copy` is plain data. It names a strided block of a source file and the strided block of a window
that it fills. This module opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from reshard.core.box import Box, Index, flat_span, intersect, row_major, run_boxes
from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.system.derived import Derived


class Copy(NamedTuple):
    """A strided block to move, with the same shape on both sides; offsets and strides in bytes.

    ``target_offset`` counts from the start of the window that contains the copy. Elements are
    multiplied by ``factor`` on the way.
    """

    fqn: str
    shape: Index
    file: str
    byte_offset: int
    byte_strides: Index
    dtype: DType
    target_offset: int
    target_strides: Index
    target_dtype: DType
    factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the bits are moved unchanged."""
        return self.dtype == self.target_dtype and self.factor == 1.0

    @property
    def is_run(self) -> bool:
        """Whether both sides are contiguous; the shape then has at most one dimension."""
        return not self.shape or (
            len(self.shape) == 1
            and self.byte_strides[0] == self.dtype.itemsize
            and self.target_strides[0] == self.target_dtype.itemsize
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Window(NamedTuple):
    """A contiguous range of one output file, which is filled in memory and written at once."""

    file: str
    byte_offset: int
    nbytes: int
    copies: Sequence[Copy]


class CopyPlanner:
    """A planner of the copies that fill boxes and runs of one tensor."""

    def __init__(self, source: Entry) -> None:
        self.fqn = source.fqn
        self.shape = source.shape
        self._index = source.layout.build_index()
        self.widest = self._index.widest
        self.is_flat = self._index.is_flat
        # The number of elements that are best read together.
        computed = _list_computed(source)
        self.step = max([1, *(file.computation.tile_nbytes // self.widest for file in computed)])
        self.computed = tuple(computed)

    def plan_block(self, box: Box, dtype: DType) -> Window:
        """Return the copies that fill one contiguous buffer with `box`."""
        volume, (start, stop) = box.volume, flat_span(box, self.shape)
        copies: Iterable[Copy] = ()
        if volume and self.is_flat and stop - start == volume:  # without the geometry of boxes
            copies = self._copy_runs(start, stop, dtype, 0)
        elif volume:
            copies = self.plan_box(box, dtype, row_major(box.shape, dtype.itemsize), 0)
        return Window("", 0, volume * dtype.itemsize, tuple(copies))

    def plan_box(self, box: Box, dtype: DType, strides: Index, at: int) -> Iterable[Copy]:
        """Return copies of every stored block that overlaps `box`, in the order of the box.

        Args:
            box: the part of the tensor to fill.
            dtype: the dtype of the output block.
            strides: the byte strides of the output block.
            at: the byte offset of the output block in its window.
        """
        copies = []
        for chunk in self._index.find_overlapping(*flat_span(box, self.shape)):
            common = intersect(box, chunk.box)
            if common:
                copies.append(_copy_overlap(self.fqn, common, chunk, box, dtype, strides, at))
        # The index returns chunks in the order of the tensor, which is not always that of the box.
        copies.sort(key=lambda copy: copy.target_offset)
        return _merge_adjacent(copies)

    def plan_run(self, start: int, stop: int, dtype: DType, at: int) -> Iterable[Copy]:
        """Return copies that fill elements `start` to `stop` of the flattened tensor."""
        if self.is_flat:
            return self._copy_runs(start, stop, dtype, at)
        return self._copy_boxes(start, stop, dtype, at)

    def _copy_boxes(self, start: int, stop: int, dtype: DType, at: int) -> Iterator[Copy]:
        for box in run_boxes(self.shape, start, stop):
            strides = row_major(box.shape, dtype.itemsize)
            yield from self.plan_box(box, dtype, strides, at)
            at += box.volume * dtype.itemsize

    def _copy_runs(self, start: int, stop: int, dtype: DType, at: int) -> Iterator[Copy]:
        fqn, wide, begin = self.fqn, dtype.itemsize, at - start * dtype.itemsize
        strides = (wide,)
        for low, high, file, offset, stored, factor in self._index.find_runs(start, stop):
            into = begin + low * wide
            steps = (stored.itemsize,)
            yield Copy(
                fqn, (high - low,), file, offset, steps, stored, into, strides, dtype, factor
            )


def _list_computed(source: Entry) -> list[Derived]:
    if source.layout.is_partition:  # every rank stores its part
        return []
    return [chunk.file for chunk in source.chunks if isinstance(chunk.file, Derived)]


def plan_block(source: Entry, box: Box, dtype: DType) -> Window:
    """Return the copies that fill one contiguous buffer with `box` of the tensor `source`."""
    return CopyPlanner(source).plan_block(box, dtype)


def dot(a: Index, b: Index) -> int:
    """Return the scalar product of two tuples: a multi-dimensional index times its strides."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def _copy_overlap(
    fqn: str, common: Box, chunk: Chunk, box: Box, dtype: DType, target: Index, at: int
) -> Copy:
    # The output block holds ``box`` at byte ``at``, with the byte strides ``target``.
    shape, strides, target_strides = _collapse_dims(common.shape, chunk.byte_strides, target)
    return Copy(
        fqn,
        shape,
        chunk.file,
        chunk.byte_offset + dot(common.within(chunk.box).origin, chunk.byte_strides),
        strides,
        chunk.dtype,
        at + dot(common.within(box).origin, target),
        target_strides,
        dtype,
        chunk.factor,
    )


def _collapse_dims(shape: Index, source: Index, target: Index) -> tuple[Index, Index, Index]:
    dims: list[tuple[int, int, int]] = []
    for extent, a, b in zip(shape, source, target, strict=True):
        # A dim of size 1 is never stepped along, so its stride must not keep its neighbours apart.
        if extent == 1:
            continue
        if dims and dims[-1][1] == a * extent and dims[-1][2] == b * extent:
            dims[-1] = (dims[-1][0] * extent, a, b)
        else:
            dims.append((extent, a, b))
    return tuple(d[0] for d in dims), tuple(d[1] for d in dims), tuple(d[2] for d in dims)


def _merge_adjacent(copies: Iterable[Copy]) -> Iterator[Copy]:
    # ``copies`` are sorted by target offset.
    last: Copy | None = None
    for copy in copies:
        if last is not None and _continues(last, copy):
            last = _extend(last, copy)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _continues(a: Copy, b: Copy) -> bool:
    return (
        a.is_run
        and b.is_run
        and (a.file, a.dtype, a.target_dtype, a.factor)
        == (b.file, b.dtype, b.target_dtype, b.factor)
        and b.byte_offset == a.byte_offset + a.numel * a.dtype.itemsize
        and b.target_offset == a.target_offset + a.numel * a.target_dtype.itemsize
    )


def _extend(a: Copy, b: Copy) -> Copy:
    return a._replace(
        shape=(a.numel + b.numel,),
        byte_strides=(a.dtype.itemsize,),
        target_strides=(a.target_dtype.itemsize,),
    )
