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

from reshard.box import Box, Index, contiguous_cuts, flat_span, intersect, row_major
from reshard.dtypes import DType
from reshard.errors import ReshardError
from reshard.manifest import Chunk, Entry, Key, Skeleton, contiguous

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Windows in the order of the output files; no two of them share a byte."""

    windows: tuple[Window, ...]

    @property
    def copied_bytes(self) -> int:
        """Source bytes that are moved, each counted once a copy."""
        return sum(
            copy.numel * copy.dtype.itemsize for window in self.windows for copy in window.copies
        )

    @property
    def window_bytes(self) -> int:
        """The largest window."""
        return max((window.nbytes for window in self.windows), default=0)


def plan(source: Mapping[Key, Entry], target: Skeleton, window_bytes: int = WINDOW_BYTES) -> Plan:
    """Plan every copy.

    Args:
        source: entries by key; both sides' coverage has been proved (`manifest.check`).
        target: the skeleton; each of its entries must be in the source, with the same shape.
        window_bytes: an upper limit of what a worker holds of each side at a time.
    """
    pieces = [
        piece
        for entry in target.entries
        for chunk in entry.chunks
        for piece in _pieces(_matching(source, entry), chunk, window_bytes)
    ]
    pieces.sort(key=lambda piece: (piece.file, piece.byte_offset))
    return Plan(tuple(_grouped(pieces, window_bytes)))


def _matching(source: Mapping[Key, Entry], wanted: Entry) -> Entry:
    found = source.get(wanted.key)
    if found is None or found.shape != wanted.shape:
        has = f"has shape {found.shape}" if found else "lacks it"
        raise ReshardError(
            wanted.fqn, f"the target needs a {wanted.kind} of {wanted.shape}, the source {has}"
        )
    return found


def _pieces(source: Entry, target: Chunk, window_bytes: int) -> Iterator[Window]:
    """One target chunk, cut into ranges of the output file."""
    held = _replica_free(source)
    widest = max([target.dtype.itemsize, *(chunk.dtype.itemsize for chunk in held.chunks)])
    if target.byte_strides != row_major(target.box.shape, target.dtype.itemsize):
        raise ReshardError(target.file, f"{source.fqn!r} would not lie contiguously")
    for cut in contiguous_cuts(target.box.shape, max(window_bytes // widest, 1)):
        origin = tuple(a + b for a, b in zip(cut.origin, target.box.origin, strict=True))
        box = Box(origin, cut.shape)
        start = target.byte_offset + _dot(cut.origin, target.byte_strides)
        nbytes = box.volume * target.dtype.itemsize
        yield Window(target.file, start, nbytes, _block(source, held, box, target))


class Blocks:
    """Boxes of one tensor as single windows, for one who asks for many."""

    def __init__(self, source: Entry) -> None:
        self._source = source
        self._held = _replica_free(source)

    def window(self, box: Box, dtype: DType) -> Window:
        """The copies that fill one contiguous buffer with a box."""
        buffer = contiguous("", 0, dtype, box, box.shape)
        copies = _block(self._source, self._held, box, buffer)
        return Window("", 0, box.volume * dtype.itemsize, copies)


def block(source: Entry, box: Box, dtype: DType) -> Window:
    """The copies that fill one contiguous buffer with a box of a tensor."""
    return Blocks(source).window(box, dtype)


@dataclass(frozen=True, slots=True)
class _Held:
    """An entry's chunks without replicas, in flat order, and where a search may begin."""

    starts: list[int]
    reaches: list[int]  # the furthest element that this chunk or one before it reaches
    chunks: list[Chunk]


def _block(source: Entry, held: _Held, box: Box, target: Chunk) -> tuple[Copy, ...]:
    """Copies of every stored block that meets the box, in the order of the box."""
    low, high = flat_span(box, source.shape)
    first, last = bisect_right(held.reaches, low), bisect_left(held.starts, high)
    copies = []
    for chunk in held.chunks[first:last]:
        common = intersect(box, chunk.box)
        if common:
            copies.append(_copy(source.fqn, common, chunk, box, target))
    return tuple(_joined(copies))


def _replica_free(entry: Entry) -> _Held:
    """The first chunk of each set of replicas, in flat order."""
    distinct: dict[Box, Chunk] = {}
    for chunk in entry.chunks:
        if chunk.box.volume:
            distinct.setdefault(chunk.box, chunk)
    spans = sorted(
        ((*flat_span(box, entry.shape), box) for box in distinct), key=lambda item: item[:2]
    )
    reaches = list(accumulate((stop for _, stop, _ in spans), max))
    return _Held([start for start, _, _ in spans], reaches, [distinct[box] for *_, box in spans])


def _dot(a: Index, b: Index) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _copy(fqn: str, common: Box, chunk: Chunk, window: Box, target: Chunk) -> Copy:
    """The copy of one common block; offsets on the target side count from the window's start."""
    shape, strides, target_strides = _collapsed(
        common.shape, chunk.byte_strides, target.byte_strides
    )
    return Copy(
        fqn,
        shape,
        chunk.file,
        chunk.byte_offset + _dot(common.within(chunk.box).origin, chunk.byte_strides),
        strides,
        chunk.dtype,
        _dot(common.within(window).origin, target.byte_strides),
        target_strides,
        target.dtype,
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


def _grouped(pieces: Iterable[Window], window_bytes: int) -> Iterator[Window]:
    """Small neighbours in a file share a window."""
    group: list[Window] = []
    for piece in pieces:
        if group and not (
            piece.file == group[0].file
            and piece.byte_offset == group[-1].byte_offset + group[-1].nbytes
            and piece.byte_offset + piece.nbytes - group[0].byte_offset <= window_bytes
        ):
            yield _merged(group)
            group = []
        group.append(piece)
    if group:
        yield _merged(group)


def _merged(group: list[Window]) -> Window:
    if len(group) == 1:
        return group[0]
    start = group[0].byte_offset
    copies = [
        replace(copy, target_offset=copy.target_offset + piece.byte_offset - start)
        for piece in group
        for copy in piece.copies
    ]
    return Window(group[0].file, start, sum(piece.nbytes for piece in group), tuple(copies))
