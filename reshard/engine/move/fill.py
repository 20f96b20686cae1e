"""Reading of a plan's copies into memory: one read for each run, then a cast or strided copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import proxy

from reshard.core.box import Index
from reshard.core.dtypes import BFLOAT16
from reshard.engine.move import compiled
from reshard.engine.move.ahead import NOTHING, Held, Pace
from reshard.engine.move.spans import Spans
from reshard.engine.planning.copies import Copy
from reshard.system import escaped
from reshard.system.checksum import crc32
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from reshard.system.ranges import Range

_Item = TypeVar("_Item")

READ_BYTES = 4 << 20
_TIMED = 64 << 10  # bytes; the time of a shorter read is not worth a measurement
_SMALL_RUN = 32 << 10  # bytes; reading so many takes about as long as another system call
_SPARSE = 4  # a read may fetch up to this many times the bytes that are used


def fill(
    pool: SourceFiles,
    copies: Iterable[Copy],
    buffer: memoryview,
    *,
    read_bytes: int = READ_BYTES,
    clamp: bool = False,
    reads: Spans | None = None,
    held: Held = NOTHING,
) -> Counter[str]:
    """Fill a buffer in memory.

    Args:
        pool: the open source files.
        copies: their target offsets count from the start of the buffer.
        buffer: bytes, in the copies' target dtypes.
        read_bytes: upper limit of one read that needs a cast or has gaps, in bytes.
        clamp: give the largest finite value in place of an infinite one that a cast would make.
        reads: receives every range that is read from a file, with its checksum.
        held: what was read ahead for these copies.

    Returns:
        For each fqn, the number of finite values that a cast made infinite.
    """
    filler = Filler(
        pool, read_bytes=read_bytes, clamp=clamp, needs_checksum=lambda _file: reads is not None
    )
    filler.held = held
    if reads is not None:
        filler.reads = reads
    for copy in copies:
        filler.fill(copy, buffer)
    filler.flush_checksums()
    return filler.overflowed


def group_into_batches(
    items: Iterable[_Item], measure: Callable[[_Item], int], limit: int
) -> Iterator[list[_Item]]:
    """Yield the items in lists, each of which ends when its sizes reach a limit."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += measure(item)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _InnerFiles(SourceFiles):
    """The files that a computation reads; their stored checksums are compared like those of others.

    The filler owns this object, which refers to it weakly: otherwise, its buffers would wait for
    the garbage collector.
    """

    def __init__(self, filler: Filler) -> None:
        super().__init__()
        # A filler serves one thread at a time, but the next read may come from another thread. So
        # the kept values must outlive the thread.
        self.kept = SimpleNamespace()
        self._filler = proxy(filler)

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at an offset of a file."""
        self._filler.read_into(path, byte_offset, target)

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytearray:  # type: ignore[override]
        """Return the bytes at an offset of a file."""
        data = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(data))
        return data


class Filler:
    """A reader of copies; each thread has one.

    Args:
        pool: the open source files.
        clamp: see `cast.cast`.
        read_bytes: upper limit of one read that needs a cast or has gaps, in bytes.
        needs_checksum: returns whether ranges read from a file are put into ``reads``.
        pace: receives how long the reads take.
    """

    def __init__(
        self,
        pool: SourceFiles,
        *,
        clamp: bool = False,
        read_bytes: int = READ_BYTES,
        needs_checksum: Callable[[str], bool],
        pace: Pace | None = None,
    ) -> None:
        self.held: Held = NOTHING  # what was read ahead for the copies at hand
        self.reads = Spans()
        self.overflowed: Counter[str] = Counter()  # fqn -> finite values made infinite
        self.flushed: Counter[str] = Counter()  # fqn -> values made zero
        self._pool = pool
        self._clamp = clamp
        self._read_bytes = read_bytes
        self._needs_checksum = needs_checksum
        self._pace = pace or Pace()
        self._files: set[str] = set()  # that were read since `take_files`
        self._last: dict[str, tuple[int, int, int]] = {}  # file -> byte offset, nbytes, crc
        self._buffer = bytearray()
        self._shared_buffer = bytearray()
        self._shared: list[tuple[str, int, int, memoryview]] = []  # file, start, stop, its bytes

    def fill(self, copy: Copy, window: memoryview) -> None:
        """Fill the part of `window` (its bytes) that belongs to `copy`."""
        if copy.is_run and copy.is_plain:
            nbytes = copy.numel * copy.dtype.itemsize
            self.read_into(copy.file, copy.byte_offset, window[copy.target_offset :][:nbytes])
            return
        for part in _split_copy(copy, self._read_bytes):
            self._convert(part, window)

    def fill_run(self, copy: Copy, first: int, into: memoryview) -> None:
        """Fill ``into`` with elements of a run, in the target's dtype.

        Args:
            copy: the run.
            first: the first element of the run to read.
            into: bytes; their number determines the number of elements.
        """
        offset = copy.byte_offset + first * copy.dtype.itemsize
        if copy.is_plain:
            self.read_into(copy.file, offset, into)
            return
        if self._fill_rounded(copy, offset, into):
            return
        numel = len(into) // copy.target_dtype.itemsize
        nbytes = numel * copy.dtype.itemsize
        raw = self.find_held(copy.file, offset, nbytes)
        if raw is None:
            if self._read_cast(copy, offset, into):
                return
            raw = self._get_buffer(nbytes)
            self.read_into(copy.file, offset, raw)
        shape = (numel,)
        self._cast(copy, shape, raw, (copy.dtype.itemsize,), into, 0, (copy.target_dtype.itemsize,))

    def _fill_rounded(self, copy: Copy, offset: int, into: memoryview) -> bool:
        if copy.target_dtype != BFLOAT16 or copy.factor != 1.0:
            return False
        rounding = copy.file.rounding if isinstance(copy.file, Derived) else None
        if rounding is None:
            return False
        overflowed = rounding.read_rounded(self._inner, offset, into)
        if overflowed is None or (overflowed and self._clamp):
            return False
        self._count(copy.fqn, overflowed, 0)
        return True

    def _read_cast(self, copy: Copy, offset: int, into: memoryview) -> bool:
        if copy.factor != 1.0 or not compiled.can_cast(copy.dtype, copy.target_dtype):
            return False
        file = self._pool.find_local(copy.file)
        if file is None:
            return False
        self._files.add(copy.file)
        start, nbytes, crc = offset, 0, None
        if self._needs_checksum(copy.file):
            start, nbytes, crc = self._continue_checksum(copy.file, offset)
        with self._pace.measure():
            read = compiled.read(
                *(file.number, offset, into, copy.dtype, copy.target_dtype),
                piece=self._get_buffer(compiled.PIECE_BYTES),
                crc=crc,
            )
        if read is None or (read[0] and self._clamp):
            return False
        overflowed, flushed, crc = read
        self._count(copy.fqn, overflowed, flushed)
        if crc is not None:
            nbytes += len(into) // copy.target_dtype.itemsize * copy.dtype.itemsize
            self._last[copy.file] = start, nbytes, crc
        return True

    def read_shared(self, copies: Iterable[Copy]) -> None:
        """Read ranges that several of these copies share, and keep them until the next call."""
        self._shared.clear()
        ranges = _find_shared_ranges(copies, self._read_bytes)
        nbytes = sum(stop - start for _, start, stop in ranges)
        if len(self._shared_buffer) < nbytes:
            self._shared_buffer = bytearray(nbytes)
        free = memoryview(self._shared_buffer)
        for file, start, stop in ranges:
            into, free = free[: stop - start], free[stop - start :]
            self.read_into(file, start, into)
            self._shared.append((file, start, stop, into))

    @cached_property
    def _inner(self) -> _InnerFiles:
        return _InnerFiles(self)

    def _get_bytes(self, file: str, offset: int, nbytes: int) -> memoryview:
        """Return a range of a file; the buffer is valid until the next call."""
        for name, start, stop, data in self._shared:
            if name == file and start <= offset and offset + nbytes <= stop:
                return data[offset - start :][:nbytes]
        held = self.find_held(file, offset, nbytes)
        if held is not None:
            return held
        raw = self._get_buffer(nbytes)
        self.read_into(file, offset, raw)
        return raw

    def _convert(self, copy: Copy, window: memoryview) -> None:
        raw = self._get_bytes(copy.file, copy.byte_offset, _compute_reach(copy))
        self._cast(
            copy,
            *(copy.shape, raw, copy.byte_strides),
            *(window, copy.target_offset, copy.target_strides),
        )

    def _cast(
        self,
        copy: Copy,
        shape: Index,
        raw: memoryview,
        byte_strides: Index,
        window: memoryview,
        offset: int,
        target_strides: Index,
    ) -> None:
        sizes = copy.dtype.itemsize, copy.target_dtype.itemsize
        if copy.factor == 1.0 and (byte_strides, target_strides) == ((sizes[0],), (sizes[1],)):
            into = window[offset:][: shape[0] * sizes[1]]
            counts = compiled.cast(raw, into, copy.dtype, copy.target_dtype, clamp=self._clamp)
            if counts is not None:  # without the import of numpy
                self._count(copy.fqn, *counts)
                return
        # The import takes about 0.2 s, and plans of plain runs and usual casts do without it.
        import numpy as np

        from reshard.engine.move import cast

        casting = not copy.is_plain
        dtype = cast.get_numpy_dtype(copy.dtype, casting=casting)
        source: Any = np.ndarray(shape, dtype, raw, 0, byte_strides)
        dtype = cast.get_numpy_dtype(copy.target_dtype, casting=casting)
        target: Any = np.ndarray(shape, dtype, window, offset, target_strides)
        if not casting:
            target[...] = source
            return
        self._count(
            copy.fqn,
            *cast.cast(
                source, target, copy.dtype, copy.target_dtype, factor=copy.factor, clamp=self._clamp
            ),
        )

    def _count(self, fqn: str, overflowed: int, flushed: int) -> None:
        if overflowed:
            self.overflowed[fqn] += overflowed
        if flushed:
            self.flushed[fqn] += flushed

    def _get_buffer(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def take_reads(self) -> Spans:
        """Return the ranges that were read since the last call, with their checksums."""
        self.flush_checksums()
        reads, self.reads = self.reads, Spans()
        return reads

    def take_files(self) -> set[str]:
        """Return the files that were read since the last call."""
        files, self._files = self._files, set()
        return files

    def flush_checksums(self) -> None:
        """Record the checksums of the ranges that were read last."""
        for file, span in self._last.items():
            self.reads.put(file, *span)
        self._last.clear()

    def read_into(self, file: str, offset: int, into: memoryview) -> None:
        """Read a range and compute its checksum, which continues that of an adjacent range."""
        if isinstance(file, Derived):
            # The computation calls this method again with the names of real files. It keeps values
            # in `_inner` that the next range of the same file needs.
            file.computation.read_into(self._inner, offset, into)
            return
        held = self.find_held(file, offset, len(into))
        if held is not None:
            into[:] = held
            return
        if len(into) >= _TIMED:
            with self._pace.measure():
                self._pool.read_into(file, offset, into)
        else:
            self._pool.read_into(file, offset, into)
        self._note_read(file, offset, into)

    def find_run(self, copy: Copy, first: int, numel: int) -> memoryview | None:
        """Return elements of a run that is moved unchanged, if they were read ahead."""
        if not copy.is_plain:
            return None
        size = copy.dtype.itemsize
        return self.find_held(copy.file, copy.byte_offset + first * size, numel * size)

    def find_held(self, file: str, offset: int, nbytes: int) -> memoryview | None:
        """Return a range that was read ahead, which counts as read now; None if it was not."""
        held = self.held.find(file, offset, nbytes)
        if held is not None:
            self._note_read(file, offset, held)
        return held

    def _note_read(self, file: str, offset: int, data: memoryview) -> None:
        self._files.add(file)
        if self._needs_checksum(file):
            start, nbytes, crc = self._continue_checksum(file, offset)
            self._last[file] = start, nbytes + len(data), crc32(data, crc)

    def _continue_checksum(self, file: str, offset: int) -> tuple[int, int, int]:
        last = self._last.get(file)
        if last is not None:
            start, nbytes, crc = last
            if start + nbytes == offset:
                return start, nbytes, crc
            self.reads.put(file, *last)
        return offset, 0, 0


def list_ranges(copies: Iterable[Copy], read_bytes: int = READ_BYTES) -> list[Range]:
    """Return the ranges of stored files that a filler reads for some copies, in any order.

    Args:
        copies: the copies.
        read_bytes: as the filler's.
    """
    ranges: list[Range] = []
    for copy in copies:
        if isinstance(copy.file, Derived) or escaped.is_escaped(copy.file):
            continue  # computed from ranges that only the computation knows
        if copy.is_run:
            ranges.append((copy.file, copy.byte_offset, copy.numel * copy.dtype.itemsize))
        else:
            parts = _split_copy(copy, read_bytes)
            ranges += ((part.file, part.byte_offset, _compute_reach(part)) for part in parts)
    return ranges


def _compute_reach(copy: Copy) -> int:
    steps = zip(copy.shape, copy.byte_strides, strict=True)
    return sum((extent - 1) * stride for extent, stride in steps) + copy.dtype.itemsize


def _find_shared_ranges(copies: Iterable[Copy], limit: int) -> list[tuple[str, int, int]]:
    """If the rows of a tensor are far apart, a range is longer than the bytes that are used."""
    spans = sorted(
        (copy.file, copy.byte_offset, copy.byte_offset + _compute_reach(copy))
        for copy in copies
        if not copy.is_run
    )
    ranges: list[tuple[str, int, int]] = []
    merged = 0  # the number of spans that were merged into the last range
    for file, start, stop in spans:
        if ranges and ranges[-1][0] == file and start < ranges[-1][2]:
            ranges[-1] = (file, ranges[-1][1], max(stop, ranges[-1][2]))
            merged += 1
            continue
        if ranges and not merged:  # only one copy reads it, so nothing is shared
            ranges.pop()
        ranges.append((file, start, stop))
        merged = 0
    if ranges and not merged:
        ranges.pop()
    # The chosen ranges stay in memory together, so the limit holds for their sum.
    free = limit
    chosen = []
    for file, start, stop in ranges:
        if stop - start <= free:
            free -= stop - start
            chosen.append((file, start, stop))
    return chosen


def _split_copy(copy: Copy, limit: int) -> Iterator[Copy]:
    # A part may contain gaps. Reading them is cheaper than another call unless they dominate.
    span = _compute_reach(copy)
    dense = span <= max(_SPARSE * copy.numel * copy.dtype.itemsize, _count_runs(copy) * _SMALL_RUN)
    if (span <= limit and dense) or copy.numel == 1:
        yield copy
        return
    wide = [d for d in range(len(copy.shape)) if copy.shape[d] > 1]
    # A cut of the dim with the largest stride shortens the reads the most.
    dim = max(wide, key=lambda d: copy.byte_strides[d])
    stride = copy.byte_strides[dim]
    row = span - (copy.shape[dim] - 1) * stride
    step = max((limit - row) // stride + 1, 1) if dense and stride else 1
    step = min(step, copy.shape[dim] - 1)  # at least two parts, so that the recursion ends
    for start in range(0, copy.shape[dim], step):
        yield from _split_copy(
            _take_slab(copy, dim, start, min(step, copy.shape[dim] - start)), limit
        )


def _count_runs(copy: Copy) -> int:
    inner = copy.shape[-1] if copy.shape and copy.byte_strides[-1] == copy.dtype.itemsize else 1
    return copy.numel // inner


def _take_slab(copy: Copy, dim: int, start: int, extent: int) -> Copy:
    return copy._replace(
        shape=(*copy.shape[:dim], extent, *copy.shape[dim + 1 :]),
        byte_offset=copy.byte_offset + start * copy.byte_strides[dim],
        target_offset=copy.target_offset + start * copy.target_strides[dim],
    )
