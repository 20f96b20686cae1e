"""Copies of a plan, read into memory: one read a run, casts and strided copies on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from reshard.box import Index
from reshard.checksum import crc32
from reshard.files import SourceFiles
from reshard.move.spans import Spans
from reshard.paths import is_remote
from reshard.plan.copies import Copy, Window

READ_BYTES = 4 << 20
_SMALL_RUN = 32 << 10  # bytes that can be read in the time of another call
_SPARSE = 4  # a read may fetch this many times the bytes that are used


def fill(
    pool: SourceFiles,
    copies: Iterable[Copy],
    buffer: memoryview,
    *,
    read_bytes: int = READ_BYTES,
    reads: Spans | None = None,
) -> Counter[str]:
    """Fill a buffer in memory; the copies' target offsets count from its start.

    Args:
        buffer: bytes, in the copies' target dtypes.
        read_bytes: an upper limit of one read that needs a cast or has gaps.
        reads: gets every range of a file that is read, with its checksum.

    Returns:
        How many finite values of each fqn a cast made infinite.
    """
    filler = Filler(pool, read_bytes=read_bytes, summed=lambda _file: reads is not None)
    if reads is not None:
        filler.reads = reads
    for copy in copies:
        filler.fill(copy, buffer)
    filler.rest()
    return filler.overflowed


class Filler:
    """Reads the blocks of copies; one a thread.

    Args:
        clamp: see `cast.cast`.
        read_bytes: an upper limit of one read that needs a cast or has gaps.
        summed: whether the checksum of what is read of a file is kept in ``reads``.
    """

    def __init__(
        self,
        pool: SourceFiles,
        *,
        clamp: bool = False,
        read_bytes: int = READ_BYTES,
        summed: Callable[[str], bool],
    ) -> None:
        self.reads = Spans()
        self.overflowed: Counter[str] = Counter()  # fqn -> finite values made infinite
        self.flushed: Counter[str] = Counter()  # fqn -> values made zero
        self._pool = pool
        self._clamp = clamp
        self._read_bytes = read_bytes
        self._summed = summed
        self._last: tuple[str, int, int, int] | None = None  # a range of a file, and its CRC
        self._buffer = bytearray()
        self._holding = bytearray()
        self._expected: Sequence[tuple[str, int, int]] = ()
        self._held: list[tuple[str, int, int, memoryview]] = []  # file, start, stop, its bytes

    def fill(self, copy: Copy, window: memoryview) -> None:
        """Fill the copy's place in a window, given as its bytes."""
        if copy.is_run and copy.is_plain:
            nbytes = copy.numel * copy.dtype.itemsize
            self._read(copy.file, copy.byte_offset, window[copy.target_offset :][:nbytes])
            return
        for part in _parts(copy, self._read_bytes):
            self._convert(part, window)

    def fill_run(self, copy: Copy, first: int, into: memoryview) -> None:
        """Fill ``into`` with elements of a run, from number ``first`` on, in the target's dtype.

        Args:
            into: bytes; its length says how many elements.
        """
        offset = copy.byte_offset + first * copy.dtype.itemsize
        if copy.is_plain:
            self._read(copy.file, offset, into)
            return
        numel = len(into) // copy.target_dtype.itemsize
        raw = self._raw(numel * copy.dtype.itemsize)
        self._read(copy.file, offset, raw)
        shape = (numel,)
        self._cast(copy, shape, raw, (copy.dtype.itemsize,), into, 0, (copy.target_dtype.itemsize,))

    def hold(self, copies: Iterable[Copy]) -> None:
        """Read once what several of these copies take from the same bytes, until the next call."""
        self._held.clear()
        found = _shared(copies, self._read_bytes)
        nbytes = sum(stop - start for _, start, stop in found)
        if len(self._holding) < nbytes:
            self._holding = bytearray(nbytes)
        room = memoryview(self._holding)
        for file, start, stop in found:
            into, room = room[: stop - start], room[stop - start :]
            self._read(file, start, into)
            self._held.append((file, start, stop, into))

    def expect(self, windows: Iterable[Window]) -> None:
        """Let an object store give at once what windows will read block by block."""
        runs = [copy for window in windows for copy in window.copies if copy.is_run]
        if runs and is_remote(runs[0].file):
            self._pool.drop(self._expected)
            self._expected = self._pool.expect(
                (copy.file, copy.byte_offset, copy.numel * copy.dtype.itemsize) for copy in runs
            )

    def _take(self, file: str, offset: int, nbytes: int) -> memoryview:
        """A range of a file, which stays until the next one is taken."""
        for held, start, stop, data in self._held:
            if held == file and start <= offset and offset + nbytes <= stop:
                return data[offset - start :][:nbytes]
        raw = self._raw(nbytes)
        self._read(file, offset, raw)
        return raw

    def _convert(self, copy: Copy, window: memoryview) -> None:
        """One read, then one strided copy or cast."""
        raw = self._take(copy.file, copy.byte_offset, _reach(copy))
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
        import numpy as np

        from reshard.move import cast

        casting = not copy.is_plain
        dtype = cast.numpy_dtype(copy.dtype, casting=casting)
        source: Any = np.ndarray(shape, dtype, raw, 0, byte_strides)
        dtype = cast.numpy_dtype(copy.target_dtype, casting=casting)
        target: Any = np.ndarray(shape, dtype, window, offset, target_strides)
        if not casting:
            target[...] = source
            return
        overflowed, flushed = cast.cast(
            source, target, copy.dtype, copy.target_dtype, factor=copy.factor, clamp=self._clamp
        )
        if overflowed:
            self.overflowed[copy.fqn] += overflowed
        if flushed:
            self.flushed[copy.fqn] += flushed

    def _raw(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def rest(self) -> None:
        """Put down the checksum of the range that was read last."""
        if self._last is not None:
            self.reads.put(*self._last)
            self._last = None

    def _read(self, file: str, offset: int, into: memoryview) -> None:
        """Read a range, and keep its checksum, or go on with that of the range before it."""
        self._pool.read_into(file, offset, into)
        if not self._summed(file):
            return
        if self._last is not None:
            before, start, nbytes, crc = self._last
            if before == file and start + nbytes == offset:
                self._last = file, start, nbytes + len(into), crc32(into, crc)
                return
            self.rest()
        self._last = file, offset, len(into), crc32(into)


def _span(shape: Index, strides: Index) -> int:
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _reach(copy: Copy) -> int:
    """Bytes from the first that a copy reads to the last."""
    return _span(copy.shape, copy.byte_strides) + copy.dtype.itemsize


def _shared(copies: Iterable[Copy], limit: int) -> list[tuple[str, int, int]]:
    """Ranges of files (start, stop) that several copies read with gaps, as many as the limit holds.

    Of a tensor whose rows lie far from one another, the ranges are longer than what is used.
    """
    spans = sorted(
        (copy.file, copy.byte_offset, copy.byte_offset + _reach(copy))
        for copy in copies
        if not copy.is_run
    )
    found: list[tuple[str, int, int]] = []
    joined = 0
    for file, start, stop in spans:
        if found and found[-1][0] == file and start < found[-1][2]:
            found[-1] = (file, found[-1][1], max(stop, found[-1][2]))
            joined += 1
            continue
        if found and not joined:
            found.pop()
        found.append((file, start, stop))
        joined = 0
    if found and not joined:
        found.pop()
    room = limit
    kept = []
    for file, start, stop in found:
        if stop - start <= room:
            room -= stop - start
            kept.append((file, start, stop))
    return kept


def _parts(copy: Copy, limit: int) -> Iterator[Copy]:
    """Cut a copy until each part is one read of at most ``limit`` bytes.

    A part may hold gaps: reading them costs less than another call, unless they are most of it.
    """
    span = _reach(copy)
    dense = span <= max(_SPARSE * copy.numel * copy.dtype.itemsize, _runs(copy) * _SMALL_RUN)
    if (span <= limit and dense) or copy.numel == 1:
        yield copy
        return
    wide = [d for d in range(len(copy.shape)) if copy.shape[d] > 1]
    dim = max(wide, key=lambda d: copy.byte_strides[d])
    stride = copy.byte_strides[dim]
    row = span - (copy.shape[dim] - 1) * stride
    step = max((limit - row) // stride + 1, 1) if dense and stride else 1
    step = min(step, copy.shape[dim] - 1)
    for start in range(0, copy.shape[dim], step):
        yield from _parts(_slab(copy, dim, start, min(step, copy.shape[dim] - start)), limit)


def _runs(copy: Copy) -> int:
    """How many contiguous pieces of the file the copy reads."""
    inner = copy.shape[-1] if copy.shape and copy.byte_strides[-1] == copy.dtype.itemsize else 1
    return copy.numel // inner


def _slab(copy: Copy, dim: int, start: int, extent: int) -> Copy:
    return replace(
        copy,
        shape=(*copy.shape[:dim], extent, *copy.shape[dim + 1 :]),
        byte_offset=copy.byte_offset + start * copy.byte_strides[dim],
        target_offset=copy.target_offset + start * copy.target_strides[dim],
    )
