"""From a source manifest and a target skeleton to a list of windows.

A plan is plain data: every byte of every target tensor is in exactly one window, every window is
one contiguous range of one output file, and the copies in it say what fills it (`copies`).
Nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from reshard.box import Box, Index, contiguous_cuts, flat_span, intersect, row_major
from reshard.dtypes import WIDEST, DType
from reshard.errors import ReshardError
from reshard.layout.runs import Runs
from reshard.manifest import Entry, Key, Skeleton
from reshard.plan.copies import Blocks, Copy, Held, Window, dot, held_by
from reshard.plan.extents import Extent, by_file

WINDOW_BYTES = 4 << 20
_SMALL = 256 << 10  # bytes of a tensor that may as well be read again for every rank


class Plan:
    """Windows in the order of the target's files, then woven tensors; no two share a byte.

    They are made each time that one goes through them, a file at a time: a plan of millions of
    copies takes the memory of one file's.

    Args:
        source: entries by key; both sides' coverage has been proved (`manifest.check`).
        target: the skeleton; each of its entries must be in the source, with the same shape.
        window_bytes: an upper limit of what a worker holds of each side at a time.

    Raises:
        ReshardError: the target asks for what the source lacks.
    """

    def __init__(
        self, source: Mapping[Key, Entry], target: Skeleton, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self.target = target
        self._limit = window_bytes
        self._sources = [_matching(source, entry) for entry in target.entries]
        for entry in target.entries:
            _check_contiguous(entry)
        pairs = enumerate(zip(self._sources, target.entries, strict=True))
        self._woven = {n for n, pair in pairs if _is_woven(*pair, min(window_bytes, _SMALL))}

    def __iter__(self) -> Iterator[Window]:
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[tuple[Window, ...]]:
        """The same windows; those of a batch read the same bytes of the source."""
        for file, groups in self._files():
            for group in groups:
                start, nbytes = group[0].byte_offset, sum(piece.nbytes for piece in group)
                copies = (c for piece in group for c in piece.copies(piece.byte_offset - start))
                yield (Window(file, start, nbytes, tuple(copies)),)
        for number in sorted(self._woven):
            yield from self._bands(self.target.entries[number], held_by(self._sources[number]))

    def by_file(self) -> Plan:
        """The same, where a file must be whole before the next: nothing is woven."""
        made = copy(self)
        made._woven = set()  # noqa: SLF001 - of this class
        return made

    @property
    def copied_bytes(self) -> int:
        """Source bytes that are moved, each counted once a copy."""
        return sum(map(_copied_bytes, self._sources, self.target.entries))

    @property
    def window_bytes(self) -> int:
        """No window is larger, and no batch reads more: the limit, or the largest file."""
        largest = max((file.nbytes for file in self.target.files), default=0)
        return min(max(self._limit, WIDEST), largest)

    def _files(self) -> Iterator[tuple[str, Iterator[list[_Piece]]]]:
        """Each output file, and the pieces of each of its windows."""
        uses = list(map(_uses, self.target.entries))
        held: dict[int, Held] = {}
        for file, found in by_file(self.target):
            extents = [extent for extent in found if extent.entry not in self._woven]
            for extent in extents:
                if extent.entry not in held:
                    held[extent.entry] = held_by(self._sources[extent.entry])
            pieces = (p for extent in extents for p in self._pieces(extent, held[extent.entry]))
            yield file, _grouped(pieces, self._limit)
            for extent in extents:
                uses[extent.entry] -= 1
                if not uses[extent.entry]:
                    del held[extent.entry]

    def _pieces(self, extent: Extent, held: Held) -> Iterator[_Piece]:
        """An extent, cut into ranges that a window can hold."""
        widest = max(extent.dtype.itemsize, held.widest)
        return _cut(extent, held, max(self._limit // widest, 1))

    def _bands(self, entry: Entry, held: Held) -> Iterator[tuple[Window, ...]]:
        """A tensor in runs that a window can hold, each with what every chunk takes of it."""
        widest = max(held.widest, *(chunk.dtype.itemsize for chunk in entry.chunks))
        for band in contiguous_cuts(entry.shape, max(self._limit // widest, 1)):
            windows = []
            for chunk in entry.chunks:
                common = intersect(band, chunk.box)
                if common:
                    at = dot(common.within(chunk.box).origin, chunk.byte_strides)
                    strides = row_major(common.shape, chunk.dtype.itemsize)
                    copies = tuple(held.of_box(common, chunk.dtype, strides, 0))
                    nbytes = common.volume * chunk.dtype.itemsize
                    windows.append(Window(chunk.file, chunk.byte_offset + at, nbytes, copies))
            yield tuple(windows)


def _matching(source: Mapping[Key, Entry], wanted: Entry) -> Entry:
    found = source.get(wanted.key)
    if found is None or found.shape != wanted.shape:
        has = f"has shape {found.shape}" if found else "lacks it"
        raise ReshardError(
            wanted.fqn, f"the target needs a {wanted.kind} of {wanted.shape}, the source {has}"
        )
    factor = (
        1.0 if isinstance(wanted.chunks, Runs) or not wanted.chunks else wanted.chunks[0].factor
    )
    if factor == 1.0:
        return found
    return replace(
        found, chunks=tuple(replace(chunk, factor=chunk.factor / factor) for chunk in found.chunks)
    )


def _check_contiguous(entry: Entry) -> None:
    for chunk in () if isinstance(entry.chunks, Runs) else entry.chunks:
        if chunk.byte_strides != row_major(chunk.box.shape, chunk.dtype.itemsize):
            raise ReshardError(chunk.file, f"{entry.fqn!r} would not lie contiguously")


def _is_woven(source: Entry, target: Entry, small: int) -> bool:
    """Whether ranks are to have rows of it that lie between one another's where it is stored.

    So do tensor-parallel ranks that share a matrix by its columns: taken file by file, its bytes
    would be read once a rank.
    """
    if isinstance(target.chunks, Runs) or isinstance(source.chunks, Runs) or target.nbytes <= small:
        return False
    boxes = [chunk.box for chunk in target.chunks if not _is_run(chunk.box, target.shape)]
    stored = {chunk.box for chunk in source.chunks} if boxes else set()
    return any(intersect(box, held) not in (None, held) for box in boxes for held in stored)


def _is_run(box: Box, shape: Index) -> bool:
    start, stop = flat_span(box, shape)
    return stop - start == box.volume


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


# Output files, cut into windows


class _Piece(NamedTuple):
    """A range of an output file that lies in one window: a box of a tensor, or a run of it."""

    byte_offset: int
    nbytes: int
    held: Held
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


def _cut(extent: Extent, held: Held, limit: int) -> Iterator[_Piece]:
    """Pieces of at most so many elements: of runs where that is simpler, else boxes."""
    at, dtype, box = extent.byte_offset, extent.dtype, extent.box
    size = dtype.itemsize
    if box is None or (held.in_runs and extent.is_run):
        for start in range(extent.start, extent.stop, limit):
            stop = min(start + limit, extent.stop)
            offset = at + (start - extent.start) * size
            yield _Piece(offset, (stop - start) * size, held, start, stop, None, (), dtype)
        return
    strides = row_major(box.shape, size)
    for cut in contiguous_cuts(box.shape, limit):
        origin = tuple(a + b for a, b in zip(cut.origin, box.origin, strict=True))
        nbytes = cut.volume * size
        offset = at + dot(cut.origin, strides)
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
