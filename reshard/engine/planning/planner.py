"""The planner: turns a source manifest and a target skeleton into windows.

A plan is plain data. Every byte of every target tensor belongs to exactly one window, every window
is one contiguous range of one output file, and its copies are the sources of its bytes (`copies`).
This module opens no file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

from reshard.core.box import Box, Index, contiguous_cuts, intersect, row_major
from reshard.core.dtypes import WIDEST, DType
from reshard.core.manifest import Entry, Key, Skeleton
from reshard.engine.planning.copies import Copy, CopyPlanner, Window, dot
from reshard.engine.planning.extents import Extent, FileIndex, Placement
from reshard.errors import ReshardError

WINDOW_BYTES = 4 << 20
_LARGEST_TILE = 64 << 20  # bytes; a larger tile is cut into several windows
_KNOWN = 64  # files whose windows are kept; equal parts need a few
_SMALL = 256 << 10  # bytes; a tensor up to this size is cheap enough to read again for every rank


class Plan:
    """The windows that fill a target: file by file, then the interleaved tensors.

    No two windows share a byte. Each iteration computes the windows anew, one file at a time, so a
    plan of millions of copies needs memory for one file's copies only.

    Args:
        source: entries by key; the coverage of both sides has been checked (`manifest.check`).
        target: the skeleton; the source must contain each of its entries with the same shape.
        window_bytes: upper limit of the bytes of each side that a worker keeps in memory.

    Raises:
        ReshardError: the source lacks an entry of the target or has it with another shape.
    """

    def __init__(
        self, source: Mapping[Key, Entry], target: Skeleton, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self.target = target
        self._limit = window_bytes
        self._sources = [_match_source(source, entry) for entry in target.entries]
        for entry in target.entries:
            _check_contiguous(entry)
        pairs = enumerate(zip(self._sources, target.entries, strict=True))
        self._interleaved = {
            n for n, pair in pairs if _is_interleaved(*pair, min(window_bytes, _SMALL))
        }

    def __iter__(self) -> Iterator[Window]:
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[tuple[Window, ...]]:
        """Yield the windows in batches; the windows of one batch read the same source bytes."""
        yield from ((window,) for window in self._iterate_windows())
        for number in sorted(self._interleaved):
            yield from self._plan_bands(
                self.target.entries[number], CopyPlanner(self._sources[number])
            )

    def without_interleaving(self) -> Plan:
        """Return a plan of the same target that completes each file before the next one."""
        plan = copy(self)
        plan._interleaved = set()  # noqa: SLF001 - of this class
        return plan

    def list_files(self) -> list[str]:
        """Return the names of the output files that have bytes of tensors, sorted."""
        return self._file_index.files()

    @cached_property
    def _file_index(self) -> FileIndex:
        return FileIndex(self.target)

    def list_parts(self, file: str) -> list[WindowPart]:
        """Return the parts of one output file in the order of their bytes, not interleaved."""
        return [
            part
            for extent in self._file_index.sort_extents(file)
            for part in self._cut_to_limit(extent, CopyPlanner(self._sources[extent.entry]))
        ]

    @property
    def copied_bytes(self) -> int:
        """Number of source bytes to move; a byte counts once for each copy that reads it."""
        return sum(map(_count_copied_bytes, self._sources, self.target.entries))

    @property
    def window_bytes(self) -> int:
        """Upper limit of a window, and of what a batch reads, in bytes."""
        largest = max((file.nbytes for file in self.target.files), default=0)
        return min(max(self._limit, WIDEST), largest)

    def _iterate_windows(self) -> Iterator[Window]:
        # Most files of an equally cut layout differ only by a shift, so what is known of the
        # windows of one file gives those of the others.
        index, planners = FileIndex(self.target), _Planners(self._sources, self.target)
        known: dict[Hashable, tuple[Placement, list[_Group]]] = {}
        for file in index.files():
            placement = index.find_placement(file)
            if placement is not None and placement.key in known:
                like, groups = known[placement.key]
                ahead = placement.position - like.position
                further = placement.byte_offset - like.byte_offset
                for start, nbytes, parts in groups:
                    yield Window(file, start + further, nbytes, _PartCopies(parts, ahead))
            else:
                extents = index.sort_extents(file)
                windows = self._group(extents, planners)
                if placement is not None:
                    if len(known) == _KNOWN:
                        # Forgetting costs time only: the next file of a kind is planned anew.
                        known.clear()
                    listed = list(windows)
                    known[placement.key], windows = (placement, listed), iter(listed)
                for start, nbytes, parts in windows:
                    yield Window(file, start, nbytes, _PartCopies(parts, 0))
                # The parts of a known placement refer to their planners, which later files need.
                if placement is None:
                    planners.drop(extents)
            index.drop(file)

    def _group(self, extents: Iterable[Extent], planners: _Planners) -> Iterator[_Group]:
        # Threads share the windows. While one takes bytes that follow others, these can still be
        # computed by another thread, unless there are further windows in between.
        listed: list[Extent] = []
        following: list[Extent] = []
        for extent in extents:
            if extent.entry not in self._interleaved:
                follows = any(file.follows for file in planners.find(extent.entry).computed)
                (following if follows else listed).append(extent)
        if following:
            listed = _insert_behind(listed, following, planners)
        parts = (
            part
            for extent in listed
            for part in self._cut_to_limit(extent, planners.find(extent.entry))
        )
        return _group_into_windows(parts, self._limit)

    def _cut_to_limit(self, extent: Extent, planner: CopyPlanner) -> Iterator[WindowPart]:
        widest = max(extent.dtype.itemsize, planner.widest)
        regular = self.target.entries[extent.entry].layout.regular
        step = regular.step if regular else 0
        return _cut_extent(extent, planner, max(self._limit // widest, 1), step)

    def _plan_bands(self, entry: Entry, planner: CopyPlanner) -> Iterator[tuple[Window, ...]]:
        # A band is a contiguous run of the tensor that fits into a window. Its bytes are read once
        # and then distributed to all chunks.
        widest = max(planner.widest, *(chunk.dtype.itemsize for chunk in entry.chunks))
        for band in contiguous_cuts(entry.shape, max(self._limit // widest, 1)):
            windows = []
            for chunk in entry.chunks:
                common = intersect(band, chunk.box)
                if common:
                    at = dot(common.within(chunk.box).origin, chunk.byte_strides)
                    strides = row_major(common.shape, chunk.dtype.itemsize)
                    copies = tuple(planner.plan_box(common, chunk.dtype, strides, 0))
                    nbytes = common.volume * chunk.dtype.itemsize
                    windows.append(Window(chunk.file, chunk.byte_offset + at, nbytes, copies))
            yield tuple(windows)


def _match_source(source: Mapping[Key, Entry], target: Entry) -> Entry:
    entry = source.get(target.key)
    if entry is None or entry.shape != target.shape:
        problem = f"has shape {entry.shape}" if entry else "lacks it"
        raise ReshardError(
            target.fqn,
            f"the target needs a {target.kind} of shape {target.shape}, but the source {problem}",
        )
    # The target stores value / factor, with one factor in all chunks of a tensor.
    factor = next((chunk.factor for chunk in target.chunks), 1.0)
    if factor == 1.0:
        return entry
    return replace(
        entry, chunks=tuple(replace(chunk, factor=chunk.factor / factor) for chunk in entry.chunks)
    )


def _check_contiguous(entry: Entry) -> None:
    chunk = entry.layout.find_strided()
    if chunk is not None:
        raise ReshardError(chunk.file, f"{entry.fqn!r} would not be contiguous in this file")


def _is_interleaved(source: Entry, target: Entry, small: int) -> bool:
    # This is the case when tensor-parallel ranks split a matrix by columns. Planned file by file,
    # every rank would read the bytes of the whole matrix again.
    if source.layout.is_partition or target.nbytes <= small:
        return False
    boxes = target.layout.cut_boxes
    stored_boxes = {chunk.box for chunk in source.chunks} if boxes else set()
    # A stored block that is wholly inside one target box is read only once in any case.
    return any(
        intersect(box, stored_box) not in (None, stored_box)
        for box in boxes
        for stored_box in stored_boxes
    )


def _count_copied_bytes(source: Entry, target: Entry) -> int:
    # With one size of elements, no copy has to be planned to know the bytes.
    sizes = {dtype.itemsize for dtype in source.layout.dtypes}
    if len(sizes) <= 1:
        return target.layout.stored_numel * sum(sizes)
    planner = CopyPlanner(source)
    copies = (
        c for chunk in target.chunks for c in planner.plan_block(chunk.box, chunk.dtype).copies
    )
    return sum(copy.numel * copy.dtype.itemsize for copy in copies)


class WindowPart(NamedTuple):
    """A part of a window: one box of a tensor, or one run of it, contiguous in the output file.

    Args:
        start: the first element of the run, or of one that contains the box.
        stop: the end of that run, exclusive.
        box: the box; None for a run.
        step: the number of elements from here to the same part of the next rank; 0 if unknown.
    """

    byte_offset: int
    nbytes: int
    source: CopyPlanner
    start: int
    stop: int
    box: Box | None
    strides: Index
    dtype: DType
    step: int = 0

    def plan_copies(self, at: int, ahead: int = 0) -> Iterable[Copy]:
        """Return the copies that fill this part, which begins at byte `at` of the window.

        Args:
            at: see above.
            ahead: plan the same part of the rank that is this number of ranks ahead.
        """
        if self.box is None:
            shift = ahead * self.step
            return self.source.plan_run(self.start + shift, self.stop + shift, self.dtype, at)
        return self.source.plan_box(self.box, self.dtype, self.strides, at)


_Group = tuple[int, int, list[WindowPart]]
"""Parts that make a window: its byte offset, its size in bytes, the parts."""


class _PartCopies(Sequence[Copy]):
    """The copies of a window, planned in the worker's thread, which needs them first."""

    __slots__ = ("_ahead", "_copies", "_parts")

    def __init__(self, parts: list[WindowPart], ahead: int) -> None:
        self._parts = parts
        self._ahead = ahead
        self._copies: tuple[Copy, ...] | None = None

    def _plan(self) -> tuple[Copy, ...]:
        if self._copies is None:
            start, ahead = self._parts[0].byte_offset, self._ahead
            self._copies = tuple(
                copy
                for part in self._parts
                for copy in part.plan_copies(part.byte_offset - start, ahead)
            )
        return self._copies

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Copy, ...]: ...
    def __getitem__(self, index: int | slice) -> Copy | tuple[Copy, ...]:
        return self._plan()[index]

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._plan())

    def __len__(self) -> int:
        return len(self._plan())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | _PartCopies) and self._plan() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._plan())


def _cut_extent(
    extent: Extent, planner: CopyPlanner, limit: int, step: int
) -> Iterator[WindowPart]:
    at, dtype, box = extent.byte_offset, extent.dtype, extent.box
    size = dtype.itemsize
    # Windows of whole tiles: a tile that two windows share would be computed twice. A run passes
    # through a block of memory, so a window of one large tile does not need more.
    whole_tiles = limit - limit % planner.step
    if whole_tiles:
        limit = whole_tiles
    elif planner.step * planner.widest <= _LARGEST_TILE and extent.is_run:
        limit = planner.step
    # A run of flat chunks can be cut at any element, and without the geometry of boxes.
    if box is None or (planner.is_flat and extent.is_run):
        for start in range(extent.start, extent.stop, limit):
            stop = min(start + limit, extent.stop)
            offset, nbytes = at + (start - extent.start) * size, (stop - start) * size
            yield WindowPart(offset, nbytes, planner, start, stop, None, (), dtype, step)
        return
    strides = row_major(box.shape, size)
    for cut in contiguous_cuts(box.shape, limit):
        nbytes = cut.volume * size
        offset = at + dot(cut.origin, strides)
        part = cut.shift(box.origin)
        yield WindowPart(offset, nbytes, planner, extent.start, extent.stop, part, strides, dtype)


def _group_into_windows(parts: Iterable[WindowPart], window_bytes: int) -> Iterator[_Group]:
    group: list[WindowPart] = []
    start = stop = 0
    for part in parts:
        first = part.byte_offset
        last = first + part.nbytes
        if group and (first != stop or last - start > window_bytes):
            yield start, stop - start, group
            group = []
        if not group:
            start = first
        group.append(part)
        stop = last
    if group:
        yield start, stop - start, group


def _insert_behind(
    listed: Sequence[Extent], following: Iterable[Extent], planners: _Planners
) -> list[Extent]:
    # What follows others is inserted behind these and one more, or at the end for another file.
    names = {
        str(name): place
        for place, extent in enumerate(listed)
        for name in planners.find(extent.entry).computed
    }
    inserted: dict[int, list[Extent]] = defaultdict(list)
    for extent in following:
        followed = (name.follows for name in planners.find(extent.entry).computed if name.follows)
        place = max(names.get(name, len(listed)) for name in followed)
        inserted[min(place + 2, len(listed))].append(extent)
    result = []
    for place in range(len(listed) + 1):
        result += [*inserted[place], *listed[place : place + 1]]
    return result


class _Planners:
    """The planners of a target's tensors; each indexes all chunks of its tensor."""

    def __init__(self, sources: Sequence[Entry], target: Skeleton) -> None:
        self._sources = sources
        self._uses = [entry.layout.part_count for entry in target.entries]
        self._planners: dict[int, CopyPlanner] = {}

    def find(self, entry: int) -> CopyPlanner:
        if entry not in self._planners:
            self._planners[entry] = CopyPlanner(self._sources[entry])
        return self._planners[entry]

    def drop(self, extents: Iterable[Extent]) -> None:
        """Free the planners whose tensors have no extents beside these and earlier ones."""
        for extent in extents:
            self._uses[extent.entry] -= 1
            if not self._uses[extent.entry]:
                self._planners.pop(extent.entry, None)
