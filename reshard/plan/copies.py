"""Which blocks of source files fill a box of a tensor: copies, found by place.

Plain data: a copy says which strided block of which file fills which strided block of a window.
Nothing is opened here.
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
from reshard.layout.runs import Runs
from reshard.manifest import Chunk, Entry


@dataclass(frozen=True, slots=True)
class Copy:
    """A block to move: equal shape on both sides, offsets and strides in bytes.

    ``target_offset`` counts from the start of the window that holds the copy; ``factor`` is what
    elements are multiplied by on the way.
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
        """Whether the bits move as they are."""
        return self.dtype == self.target_dtype and self.factor == 1.0

    @property
    def is_run(self) -> bool:
        """Whether both sides are contiguous; then the shape has at most one dim."""
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
    """A contiguous range of one output file, filled in memory and written at once."""

    file: str
    byte_offset: int
    nbytes: int
    copies: tuple[Copy, ...]


class Blocks:
    """Boxes of one tensor as single windows, for one who asks for many."""

    def __init__(self, source: Entry) -> None:
        self._held = held_by(source)

    def window(self, box: Box, dtype: DType) -> Window:
        """The copies that fill one contiguous buffer with a box."""
        strides = row_major(box.shape, dtype.itemsize)
        copies = self._held.of_box(box, dtype, strides, 0) if box.volume else ()
        return Window("", 0, box.volume * dtype.itemsize, tuple(copies))


def block(source: Entry, box: Box, dtype: DType) -> Window:
    """The copies that fill one contiguous buffer with a box of a tensor."""
    return Blocks(source).window(box, dtype)


# What the source holds of a tensor, to be found by place


class Held:
    """The chunks of an entry without replicas, in flat order.

    ``in_runs`` is whether each is a run of the flattened tensor and lies contiguously: then runs of
    the output are made of them without a look at boxes.
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
        # the furthest element that this chunk or one before it reaches
        self._reaches = list(accumulate(self._stops, max))
        self._chunks = [distinct[box] for *_, box in spans]
        self.widest = max((chunk.dtype.itemsize for chunk in self._chunks), default=1)
        self.in_runs = all(
            stop - start == box.volume and _is_contiguous(distinct[box])
            for start, stop, box in spans
        )

    def meeting(self, start: int, stop: int) -> Iterable[Chunk]:
        """Those that may hold an element of a run; all that do are among them."""
        first, last = bisect_right(self._reaches, start), bisect_left(self._starts, stop)
        return self._chunks[first:last]

    def of_box(self, box: Box, dtype: DType, strides: Index, at: int) -> Iterable[Copy]:
        """Copies of every stored block that meets a box, in the order of the box.

        Args:
            dtype, strides: of the block of the output that the box fills.
            at: where that begins in its window.
        """
        copies = []
        for chunk in self.meeting(*flat_span(box, self.shape)):
            common = intersect(box, chunk.box)
            if common:
                copies.append(_copy(self.fqn, common, chunk, box, dtype, strides, at))
        copies.sort(key=lambda copy: copy.target_offset)
        return _joined(copies)

    def of_run(self, start: int, stop: int, dtype: DType, at: int) -> Iterable[Copy]:
        """The same for a run of the flattened tensor."""
        if self.in_runs:
            yield from _joined(self._runs_of(start, stop, dtype, at))
            return
        for box in run_boxes(self.shape, start, stop):
            strides = row_major(box.shape, dtype.itemsize)
            yield from self.of_box(box, dtype, strides, at)
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


class HeldRuns(Held):
    """Of an entry in equal runs: nothing is searched for, and runs meet without boxes."""

    def __init__(self, fqn: str, runs: Runs) -> None:
        self.fqn = fqn
        self.shape = runs.shape
        self.widest = runs.dtype.itemsize
        self.in_runs = True
        self._runs = runs

    def meeting(self, start: int, stop: int) -> Iterable[Chunk]:
        """Those that may hold an element of a run; all that do are among them."""
        return (c for rank in self._runs.ranks(start, stop) for c in self._runs.of_rank(rank))

    def of_run(self, start: int, stop: int, dtype: DType, at: int) -> Iterable[Copy]:
        """Copies of every rank's part of a run of the flattened tensor."""
        runs, size, wide = self._runs, self._runs.dtype.itemsize, dtype.itemsize
        for rank in runs.ranks(start, stop):
            first = rank * runs.step
            low, high = max(start, first), min(stop, first + runs.step)
            yield Copy(
                self.fqn,
                (high - low,),
                runs.places.files[rank],
                runs.byte_offset(rank) + (low - first) * size,
                (size,),
                runs.dtype,
                at + (low - start) * wide,
                (wide,),
                dtype,
            )


def _is_contiguous(chunk: Chunk) -> bool:
    wanted = row_major(chunk.box.shape, chunk.dtype.itemsize)
    dims = zip(chunk.box.shape, chunk.byte_strides, wanted, strict=True)
    return all(extent == 1 or stride == step for extent, stride, step in dims)


def held_by(entry: Entry) -> Held:
    """What the source holds of an entry."""
    if isinstance(entry.chunks, Runs):
        return HeldRuns(entry.fqn, entry.chunks)
    return Held(entry)


def dot(a: Index, b: Index) -> int:
    """An index times strides."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def _copy(
    fqn: str, common: Box, chunk: Chunk, box: Box, dtype: DType, target: Index, at: int
) -> Copy:
    """The copy of the block that a chunk and a box have in common.

    Args:
        dtype, target: the box's dtype and strides in the window, where it begins at byte ``at``.
    """
    shape, strides, target_strides = _collapsed(common.shape, chunk.byte_strides, target)
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


def _collapsed(shape: Index, source: Index, target: Index) -> tuple[Index, Index, Index]:
    """The same block with as few dims as possible: size-1 dims gone, joined dims merged."""
    dims: list[tuple[int, int, int]] = []
    for extent, a, b in zip(shape, source, target, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == a * extent and dims[-1][2] == b * extent:
            dims[-1] = (dims[-1][0] * extent, a, b)
        else:
            dims.append((extent, a, b))
    return tuple(d[0] for d in dims), tuple(d[1] for d in dims), tuple(d[2] for d in dims)


def _joined(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Runs that follow one another on both sides become one.

    Args:
        copies: in the order of their target offsets.
    """
    last: Copy | None = None
    for copy in copies:
        if last is not None and _follows(last, copy):
            last = _extended(last, copy)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _follows(a: Copy, b: Copy) -> bool:
    return (
        a.is_run
        and b.is_run
        and (a.file, a.dtype, a.target_dtype, a.factor)
        == (b.file, b.dtype, b.target_dtype, b.factor)
        and b.byte_offset == a.byte_offset + a.numel * a.dtype.itemsize
        and b.target_offset == a.target_offset + a.numel * a.target_dtype.itemsize
    )


def _extended(a: Copy, b: Copy) -> Copy:
    return replace(
        a,
        shape=(a.numel + b.numel,),
        byte_strides=(a.dtype.itemsize,),
        target_strides=(a.target_dtype.itemsize,),
    )
