"""Strided copies: which blocks of the source files fill a given box of a tensor.

A `Copy` is plain data. It names a strided block of a source file and the strided block of a window
that it fills. This module opens no file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import itemgetter

from reshard.box import Box, Index, flat_span, intersect, row_major, run_boxes
from reshard.dtypes import DType
from reshard.layout.runs import EqualRuns
from reshard.manifest import Chunk, Entry


@dataclass(frozen=True, slots=True)
class Copy:
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


@dataclass(frozen=True, slots=True)
class Window:
    """A contiguous range of one output file, which is filled in memory and written at once."""

    file: str
    byte_offset: int
    nbytes: int
    copies: tuple[Copy, ...]


class BlockPlanner:
    """A planner of many boxes of one tensor, which builds the tensor's chunk index only once."""

    def __init__(self, source: Entry) -> None:
        self._index = build_chunk_index(source)

    def plan(self, box: Box, dtype: DType) -> Window:
        """Return the copies that fill one contiguous buffer with `box`."""
        strides = row_major(box.shape, dtype.itemsize)
        copies = self._index.plan_box(box, dtype, strides, 0) if box.volume else ()
        return Window("", 0, box.volume * dtype.itemsize, tuple(copies))


def plan_block(source: Entry, box: Box, dtype: DType) -> Window:
    """Return the copies that fill one contiguous buffer with `box` of the tensor `source`."""
    return BlockPlanner(source).plan(box, dtype)


class ChunkIndex:
    """An index of the distinct chunks of one entry, in flat order; replicas are left out.

    ``is_flat`` says whether every chunk is a contiguous run of the flattened tensor. Runs of the
    output are then planned without computing boxes.
    """

    def __init__(self, entry: Entry) -> None:
        self.fqn = entry.fqn
        self.shape = entry.shape
        distinct: dict[Box, Chunk] = {}
        for chunk in entry.chunks:
            if chunk.box.volume:
                distinct.setdefault(chunk.box, chunk)
        spans = sorted(((*flat_span(box, entry.shape), box) for box in distinct), key=itemgetter(0))
        self._starts = [start for start, _, _ in spans]
        self._stops = [stop for _, stop, _ in spans]
        # For each chunk: the largest stop of this chunk and of those before it. Chunks may nest, so
        # the stops themselves are not sorted and cannot be bisected.
        self._reaches = list(accumulate(self._stops, max))
        self._chunks = [distinct[box] for *_, box in spans]
        self.widest = max((chunk.dtype.itemsize for chunk in self._chunks), default=1)
        self.is_flat = all(
            stop - start == box.volume and _is_contiguous(distinct[box])
            for start, stop, box in spans
        )

    def find_overlapping(self, start: int, stop: int) -> Iterable[Chunk]:
        """Return the chunks that can overlap elements `start` to `stop`; a few may not."""
        first, last = bisect_right(self._reaches, start), bisect_left(self._starts, stop)
        return self._chunks[first:last]

    def plan_box(self, box: Box, dtype: DType, strides: Index, at: int) -> Iterable[Copy]:
        """Return copies of every stored block that overlaps `box`, in the order of the box.

        Args:
            box: the part of the tensor to fill.
            dtype: the dtype of the output block.
            strides: the byte strides of the output block.
            at: the byte offset of the output block in its window.
        """
        copies = []
        for chunk in self.find_overlapping(*flat_span(box, self.shape)):
            common = intersect(box, chunk.box)
            if common:
                copies.append(_copy_overlap(self.fqn, common, chunk, box, dtype, strides, at))
        copies.sort(key=lambda copy: copy.target_offset)
        return _merge_adjacent(copies)

    def plan_run(self, start: int, stop: int, dtype: DType, at: int) -> Iterable[Copy]:
        """Yield copies that fill elements `start` to `stop` of the flattened tensor."""
        if self.is_flat:
            yield from _merge_adjacent(self._runs_of(start, stop, dtype, at))
            return
        for box in run_boxes(self.shape, start, stop):
            strides = row_major(box.shape, dtype.itemsize)
            yield from self.plan_box(box, dtype, strides, at)
            at += box.volume * dtype.itemsize

    def _runs_of(self, start: int, stop: int, dtype: DType, at: int) -> Iterator[Copy]:
        first, last = bisect_right(self._reaches, start), bisect_left(self._starts, stop)
        for number in range(first, last):
            chunk, begin = self._chunks[number], self._starts[number]
            low, high = max(start, begin), min(stop, self._stops[number])
            size, wide = chunk.dtype.itemsize, dtype.itemsize
            yield Copy(
                self.fqn,
                (high - low,),
                chunk.file,
                chunk.byte_offset + (low - begin) * size,
                (size,),
                chunk.dtype,
                at + (low - start) * wide,
                (wide,),
                dtype,
                chunk.factor,
            )


class RunIndex(ChunkIndex):
    """An index of an entry that is stored as equal runs: positions are computed, not searched."""

    def __init__(self, fqn: str, runs: EqualRuns) -> None:
        self.fqn = fqn
        self.shape = runs.shape
        self.widest = runs.dtype.itemsize
        self.is_flat = True
        self._runs = runs

    def find_overlapping(self, start: int, stop: int) -> Iterable[Chunk]:
        """Yield the chunks that can overlap elements `start` to `stop` of the flattened tensor."""
        return (c for rank in self._runs.ranks(start, stop) for c in self._runs.of_rank(rank))

    def plan_run(self, start: int, stop: int, dtype: DType, at: int) -> Iterable[Copy]:
        """Yield one copy for each rank that stores a part of elements `start` to `stop`."""
        runs, size, wide = self._runs, self._runs.dtype.itemsize, dtype.itemsize
        for rank in runs.ranks(start, stop):
            first = rank * runs.step
            low, high = max(start, first), min(stop, first + runs.step)
            yield Copy(
                self.fqn,
                (high - low,),
                runs.offsets.files[rank],
                runs.byte_offset(rank) + (low - first) * size,
                (size,),
                runs.dtype,
                at + (low - start) * wide,
                (wide,),
                dtype,
            )


def _is_contiguous(chunk: Chunk) -> bool:
    contiguous = row_major(chunk.box.shape, chunk.dtype.itemsize)
    dims = zip(chunk.box.shape, chunk.byte_strides, contiguous, strict=True)
    return all(extent == 1 or stride == step for extent, stride, step in dims)


def build_chunk_index(entry: Entry) -> ChunkIndex:
    """Return an index of the chunks that the source stores for `entry`."""
    if isinstance(entry.chunks, EqualRuns):
        return RunIndex(entry.fqn, entry.chunks)
    return ChunkIndex(entry)


def dot(a: Index, b: Index) -> int:
    """Return the scalar product of two tuples: a multi-dimensional index times its strides."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def _copy_overlap(
    fqn: str, common: Box, chunk: Chunk, box: Box, dtype: DType, target: Index, at: int
) -> Copy:
    """Return the copy of `common`, the overlap of `chunk` and `box`.

    Args:
        fqn: the name of the tensor.
        common: the overlap, in coordinates of the tensor.
        chunk: the stored chunk to copy from.
        box: the box of the tensor that the output block holds.
        dtype: the dtype of the output block.
        target: the byte strides of the output block.
        at: the byte offset of the output block in its window.
    """
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
    """Drop dimensions of size 1 and merge dimensions that are contiguous on both sides."""
    dims: list[tuple[int, int, int]] = []
    for extent, a, b in zip(shape, source, target, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == a * extent and dims[-1][2] == b * extent:
            dims[-1] = (dims[-1][0] * extent, a, b)
        else:
            dims.append((extent, a, b))
    return tuple(d[0] for d in dims), tuple(d[1] for d in dims), tuple(d[2] for d in dims)


def _merge_adjacent(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Merge runs that are adjacent in the source file and in the window.

    Args:
        copies: sorted by target offset.
    """
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
    return replace(
        a,
        shape=(a.numel + b.numel,),
        byte_strides=(a.dtype.itemsize,),
        target_strides=(a.target_dtype.itemsize,),
    )
