"""From a source manifest and a target skeleton to a sorted list of copies.

A plan is plain data: every byte of every target tensor is in exactly one window, every window is
one contiguous range of one output file, and every copy in it says which strided block of which
source file fills which strided block of the window. Nothing is opened here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

from reshard.box import Box, Index, contiguous_cuts, flat_span, intersect, row_major, run_boxes
from reshard.dtypes import DType
from reshard.errors import ReshardError
from reshard.extents import Extent, by_file
from reshard.manifest import Chunk, Entry, Key, Skeleton
from reshard.runs import Runs

WINDOW_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Copy:
    """A block to move: equal shape on both sides, offsets and strides in bytes.

    ``target_offset`` counts from the start of the window that holds the copy.
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


class Plan:
    """Windows in the order of the output files; no two of them share a byte.

    They are made each time that one goes through them, a file at a time: a plan of millions of
    copies takes the memory of one file's.

    Raises:
        ReshardError: the target asks for what the source lacks.
    """

    def __init__(
        self, source: Mapping[Key, Entry], target: Skeleton, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._target = target
        self._limit = window_bytes
        self._sources = [_matching(source, entry) for entry in target.entries]
        for entry in target.entries:
            _check_contiguous(entry)

    def __iter__(self) -> Iterator[Window]:
        for file, groups in self._files():
            for group in groups:
                start, nbytes = group[0].byte_offset, sum(piece.nbytes for piece in group)
                copies = (c for piece in group for c in piece.copies(piece.byte_offset - start))
                yield Window(file, start, nbytes, tuple(copies))

    @property
    def copied_bytes(self) -> int:
        """Source bytes that are moved, each counted once a copy."""
        return sum(map(_copied_bytes, self._sources, self._target.entries))

    @property
    def window_bytes(self) -> int:
        """The largest window."""
        sizes = (sum(piece.nbytes for piece in g) for _, groups in self._files() for g in groups)
        return max(sizes, default=0)

    def _files(self) -> Iterator[tuple[str, Iterator[list[_Piece]]]]:
        """Each output file, and the pieces of each of its windows."""
        uses = list(map(_uses, self._target.entries))
        held: dict[int, _Held] = {}
        for file, extents in by_file(self._target):
            for extent in extents:
                if extent.entry not in held:
                    held[extent.entry] = _held(self._sources[extent.entry])
            pieces = (p for extent in extents for p in self._pieces(extent, held[extent.entry]))
            yield file, _grouped(pieces, self._limit)
            for extent in extents:
                uses[extent.entry] -= 1
                if not uses[extent.entry]:
                    del held[extent.entry]

    def _pieces(self, extent: Extent, held: _Held) -> Iterator[_Piece]:
        """An extent, cut into ranges that a window can hold."""
        widest = max(extent.dtype.itemsize, held.widest)
        return _cut(extent, held, max(self._limit // widest, 1))


def plan(source: Mapping[Key, Entry], target: Skeleton, window_bytes: int = WINDOW_BYTES) -> Plan:
    """Plan every copy.

    Args:
        source: entries by key; both sides' coverage has been proved (`manifest.check`).
        target: the skeleton; each of its entries must be in the source, with the same shape.
        window_bytes: an upper limit of what a worker holds of each side at a time.
    """
    return Plan(source, target, window_bytes)


def _matching(source: Mapping[Key, Entry], wanted: Entry) -> Entry:
    found = source.get(wanted.key)
    if found is None or found.shape != wanted.shape:
        has = f"has shape {found.shape}" if found else "lacks it"
        raise ReshardError(
            wanted.fqn, f"the target needs a {wanted.kind} of {wanted.shape}, the source {has}"
        )
    return found


def _check_contiguous(entry: Entry) -> None:
    for chunk in () if isinstance(entry.chunks, Runs) else entry.chunks:
        if chunk.byte_strides != row_major(chunk.box.shape, chunk.dtype.itemsize):
            raise ReshardError(chunk.file, f"{entry.fqn!r} would not lie contiguously")


def _copied_bytes(source: Entry, target: Entry) -> int:
    """Every element of the target is copied once, from a chunk whose dtype says its size."""
    if isinstance(source.chunks, Runs):
        return _numel(target) * source.chunks.dtype.itemsize
    sizes = {chunk.dtype.itemsize for chunk in source.chunks}
    if len(sizes) <= 1:
        return _numel(target) * sum(sizes)
    found = Blocks(source)
    copies = (c for held in target.chunks for c in found.window(held.box, held.dtype).copies)
    return sum(copy.numel * copy.dtype.itemsize for copy in copies)


def _numel(entry: Entry) -> int:
    if isinstance(entry.chunks, Runs):
        return entry.numel
    return sum(chunk.box.volume for chunk in entry.chunks)


def _uses(entry: Entry) -> int:
    """In how many extents of the output an entry is."""
    if isinstance(entry.chunks, Runs):
        return len(entry.chunks.ranks(0, entry.numel))
    return sum(1 for chunk in entry.chunks if chunk.box.volume)


class Blocks:
    """Boxes of one tensor as single windows, for one who asks for many."""

    def __init__(self, source: Entry) -> None:
        self._held = _held(source)

    def window(self, box: Box, dtype: DType) -> Window:
        """The copies that fill one contiguous buffer with a box."""
        strides = row_major(box.shape, dtype.itemsize)
        copies = self._held.of_box(box, dtype, strides, 0) if box.volume else ()
        return Window("", 0, box.volume * dtype.itemsize, tuple(copies))


def block(source: Entry, box: Box, dtype: DType) -> Window:
    """The copies that fill one contiguous buffer with a box of a tensor."""
    return Blocks(source).window(box, dtype)


# What the source holds of a tensor, to be found by place


class _Held:
    """The chunks of an entry without replicas, in flat order."""

    def __init__(self, entry: Entry) -> None:
        self.fqn = entry.fqn
        self.shape = entry.shape
        distinct: dict[Box, Chunk] = {}
        for chunk in entry.chunks:
            if chunk.box.volume:
                distinct.setdefault(chunk.box, chunk)
        spans = sorted(
            ((*flat_span(box, entry.shape), box) for box in distinct), key=lambda item: item[:2]
        )
        self._starts = [start for start, _, _ in spans]
        # the furthest element that this chunk or one before it reaches
        self._reaches = list(accumulate((stop for _, stop, _ in spans), max))
        self._chunks = [distinct[box] for *_, box in spans]
        self.widest = max((chunk.dtype.itemsize for chunk in self._chunks), default=1)

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
        return _joined(copies) if len(copies) > 1 else copies

    def of_run(self, start: int, stop: int, dtype: DType, at: int) -> Iterable[Copy]:
        """The same for a run of the flattened tensor."""
        for box in run_boxes(self.shape, start, stop):
            strides = row_major(box.shape, dtype.itemsize)
            yield from self.of_box(box, dtype, strides, at)
            at += box.volume * dtype.itemsize


class _HeldRuns(_Held):
    """Of an entry in equal runs: nothing is searched for, and runs meet without boxes."""

    def __init__(self, fqn: str, runs: Runs) -> None:
        self.fqn = fqn
        self.shape = runs.shape
        self.widest = runs.dtype.itemsize
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


def _held(entry: Entry) -> _Held:
    if isinstance(entry.chunks, Runs):
        return _HeldRuns(entry.fqn, entry.chunks)
    return _Held(entry)


# Output files, cut into windows


class _Piece(NamedTuple):
    """A range of an output file that lies in one window: a box of a tensor, or a run of it."""

    byte_offset: int
    nbytes: int
    held: _Held
    start: int
    stop: int
    box: Box | None
    strides: Index
    dtype: DType

    def copies(self, at: int) -> Iterable[Copy]:
        """What fills it, from a byte of the window on."""
        if self.box is None:
            return self.held.of_run(self.start, self.stop, self.dtype, at)
        return self.held.of_box(self.box, self.dtype, self.strides, at)


def _cut(extent: Extent, held: _Held, limit: int) -> Iterator[_Piece]:
    """Pieces of at most so many elements: of runs where that is simpler, else boxes."""
    at, dtype, box = extent.byte_offset, extent.dtype, extent.box
    size = dtype.itemsize
    if box is None or (isinstance(held, _HeldRuns) and extent.is_run):
        for start in range(extent.start, extent.stop, limit):
            stop = min(start + limit, extent.stop)
            offset = at + (start - extent.start) * size
            yield _Piece(offset, (stop - start) * size, held, start, stop, None, (), dtype)
        return
    strides = row_major(box.shape, size)
    for cut in contiguous_cuts(box.shape, limit):
        origin = tuple(a + b for a, b in zip(cut.origin, box.origin, strict=True))
        nbytes = cut.volume * size
        offset = at + _dot(cut.origin, strides)
        yield _Piece(offset, nbytes, held, 0, 0, Box(origin, cut.shape), strides, dtype)


def _grouped(pieces: Iterable[_Piece], window_bytes: int) -> Iterator[list[_Piece]]:
    """Small neighbours in a file share a window."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and not (
            piece.byte_offset == group[-1].byte_offset + group[-1].nbytes
            and piece.byte_offset + piece.nbytes - group[0].byte_offset <= window_bytes
        ):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


# Copies


def _dot(a: Index, b: Index) -> int:
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
        chunk.byte_offset + _dot(common.within(chunk.box).origin, chunk.byte_strides),
        strides,
        chunk.dtype,
        at + _dot(common.within(box).origin, target),
        target_strides,
        dtype,
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
    """Runs that follow one another on both sides become one."""
    last: Copy | None = None
    for copy in sorted(copies, key=lambda copy: copy.target_offset):
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
        and (a.file, a.dtype, a.target_dtype) == (b.file, b.dtype, b.target_dtype)
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
