"""The only module that moves tensor bytes: windows filled from sources, written, checked.

Workers take windows from one list; each holds one window and one read buffer, so memory is
``workers * (window + buffer)`` whatever the checkpoint's size, and the bytes written do not depend
on how many workers there are. Checksums that the source files carry are compared on the way
through; every window's own checksum is kept for reading back.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.box import Index
from reshard.checksum import crc32, join
from reshard.errors import DifferentError, ReshardError, ResourceError
from reshard.files import SourceFiles
from reshard.manifest import OutputFile, Skeleton, SourceFile
from reshard.plan import Copy, Plan, Window
from reshard.records import Spans, check_record, crc_of, record_crc
from reshard.workers import spread

READ_BYTES = 4 << 20
_SMALL_RUN = 32 << 10  # bytes that can be read in the time of another call
_JOIN_BYTES = 64 << 10  # joining checksums of larger parts is cheaper than reading them again
_SPARSE = 4  # a read may fetch this many times the bytes that are used

Progress = Callable[[int], None]


def unseen(_nbytes: int) -> None:
    """Progress that nobody watches."""


ReadSpan = tuple[str, int, int, int]  # file, byte offset, nbytes, crc


@dataclass(slots=True)
class Outcome:
    """What an execution saw; each worker keeps its own, and they are added up."""

    windows: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # -> nbytes, crc
    reads: list[ReadSpan] = field(default_factory=list)
    overflowed: Counter[str] = field(default_factory=Counter)  # fqn -> finite values made infinite
    flushed: Counter[str] = field(default_factory=Counter)  # fqn -> values made zero

    def add(self, other: Outcome) -> None:
        """Take over what another worker saw."""
        self.windows.update(other.windows)
        self.reads += other.reads
        self.overflowed += other.overflowed
        self.flushed += other.flushed


def execute(
    plan: Plan,
    skeleton: Skeleton,
    sources: Mapping[str, SourceFile],
    directory: Path,
    *,
    workers: int,
    read_bytes: int = READ_BYTES,
    clamp: bool = False,
    progress: Progress = unseen,
) -> Outcome:
    """Create the skeleton's files in ``directory`` and fill them.

    Args:
        read_bytes: an upper limit of one read that needs a cast or has gaps.
        clamp: see `cast.cast`.
        progress: called with the bytes of every finished window.

    Raises:
        CorruptError: a source record does not match its stored checksum, or a file is short.
        ResourceError: the disk is full.
    """
    for file in skeleton.files:
        _create(file, directory)
    outcome = Outcome()
    team: list[_Worker] = []
    with SourceFiles() as pool:

        def hire() -> _Worker:
            team.append(_Worker(_Filler(pool, clamp=clamp, read_bytes=read_bytes), directory))
            return team[-1]

        spread(plan, hire, workers, lambda window: progress(window.nbytes))
        for worker in team:
            outcome.add(worker.filler.seen)
        _check_records(outcome, sources, pool, workers)
        _store_checksums(skeleton, outcome, directory, pool)
    return outcome


def read_back(
    outcome: Outcome, directory: Path, *, workers: int, progress: Progress = unseen
) -> None:
    """Read every window from the finished files and compare its checksum.

    Raises:
        DifferentError: a window does not hold what was written.
    """
    with SourceFiles() as pool:

        def check(item: tuple[tuple[str, int], tuple[int, int]]) -> None:
            (name, offset), (nbytes, crc) = item
            if crc_of(pool, str(directory / name), offset, nbytes) != crc:
                raise DifferentError(
                    directory / name,
                    f"bytes {offset} to {offset + nbytes} read back differ from those written",
                    "the disk or its file system is at fault: nothing was kept",
                )

        spread(
            sorted(outcome.windows.items()),
            lambda: check,
            workers,
            lambda item: progress(item[1][0]),
        )


def _create(file: OutputFile, directory: Path) -> None:
    """A file at its full size, with its literals."""
    path = directory / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb", buffering=0) as created:
            created.truncate(file.nbytes)
            for offset, data in file.literals:
                _pwrite(created.fileno(), memoryview(data), offset)
    except OSError as error:
        raise _disk_error(path, error) from error


def _write(path: Path, data: memoryview, offset: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _disk_error(path, error) from error


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _disk_error(path: Path, error: OSError) -> ReshardError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(
            path.parent, f"the disk is full ({error.strerror})", "free space, or write elsewhere"
        )
    return ReshardError(path, f"cannot be written: {error.strerror}")


def fill(
    pool: SourceFiles,
    copies: Iterable[Copy],
    buffer: memoryview,
    *,
    read_bytes: int = READ_BYTES,
    reads: list[ReadSpan] | None = None,
) -> Counter[str]:
    """Fill a buffer in memory; the copies' target offsets count from its start.

    Args:
        read_bytes: an upper limit of one read that needs a cast or has gaps.
        reads: gets every range of a file that is read, with its checksum.

    Returns:
        How many finite values of each fqn a cast made infinite.
    """
    filler = _Filler(pool, clamp=False, read_bytes=read_bytes, check=reads is not None)
    for copy in copies:
        filler.fill(copy, buffer)
    if reads is not None:
        reads += filler.seen.reads
    return filler.seen.overflowed


class _Filler:
    """Reads the blocks of copies into a window in memory, casting on the way."""

    def __init__(
        self, pool: SourceFiles, *, clamp: bool, read_bytes: int, check: bool = True
    ) -> None:
        self.pool = pool
        self.check = check
        self.clamp = clamp
        self.read_bytes = read_bytes
        self.buffer = bytearray()
        self.seen = Outcome()

    def fill(self, copy: Copy, window: memoryview) -> int | None:
        """Fill the copy's place; its checksum where that comes for nothing."""
        if copy.is_run and copy.dtype == copy.target_dtype:
            nbytes = copy.numel * copy.dtype.itemsize
            return self._read(copy.file, copy.byte_offset, window[copy.target_offset :][:nbytes])
        for part in _parts(copy, self.read_bytes):
            self._convert(part, window)
        return None

    def _convert(self, copy: Copy, window: memoryview) -> None:
        """One read, then one strided copy or cast."""
        import numpy as np

        from reshard import cast

        nbytes = _span(copy.shape, copy.byte_strides) + copy.dtype.itemsize
        if len(self.buffer) < nbytes:
            self.buffer = bytearray(nbytes)
        raw = memoryview(self.buffer)[:nbytes]
        self._read(copy.file, copy.byte_offset, raw)
        casting = copy.dtype != copy.target_dtype
        source: Any = np.ndarray(
            copy.shape, cast.numpy_dtype(copy.dtype, casting=casting), raw, 0, copy.byte_strides
        )
        target: Any = np.ndarray(
            copy.shape,
            cast.numpy_dtype(copy.target_dtype, casting=casting),
            window,
            copy.target_offset,
            copy.target_strides,
        )
        if not casting:
            target[...] = source
            return
        overflowed, flushed = cast.cast(
            source, target, copy.dtype, copy.target_dtype, clamp=self.clamp
        )
        if overflowed:
            self.seen.overflowed[copy.fqn] += overflowed
        if flushed:
            self.seen.flushed[copy.fqn] += flushed

    def _read(self, file: str, offset: int, into: memoryview) -> int | None:
        self.pool.read_into(file, offset, into)
        if not self.check:
            return None
        crc = crc32(into)
        self.seen.reads.append((file, offset, len(into), crc))
        return crc


class _Worker:
    """One thread: fills a window in memory and writes it at once."""

    def __init__(self, filler: _Filler, directory: Path) -> None:
        self.filler = filler
        self.directory = directory
        self.window = bytearray()

    def __call__(self, window: Window) -> None:
        if len(self.window) < window.nbytes:
            self.window = bytearray(window.nbytes)
        held = memoryview(self.window)[: window.nbytes]
        crcs = [self.filler.fill(copy, held) for copy in window.copies]
        sizes = [copy.numel * copy.target_dtype.itemsize for copy in window.copies]
        if sum(sizes) != window.nbytes:  # the coverage proof makes this impossible
            raise AssertionError(f"{sum(sizes)} of {window.nbytes} bytes of a window were filled")
        _write(self.directory / window.file, held, window.byte_offset)
        known = [crc for crc in crcs if crc is not None]
        joined = len(known) == len(sizes) and len(sizes) * _JOIN_BYTES < window.nbytes
        crc = join(zip(known, sizes, strict=True)) if joined else crc32(held)
        self.filler.seen.windows[window.file, window.byte_offset] = window.nbytes, crc


def _span(shape: Index, strides: Index) -> int:
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _parts(copy: Copy, limit: int) -> Iterator[Copy]:
    """Cut a copy until each part is one read of at most ``limit`` bytes.

    A part may hold gaps: reading them costs less than another call, unless they are most of it.
    """
    span = _span(copy.shape, copy.byte_strides) + copy.dtype.itemsize
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


def _check_records(
    outcome: Outcome, sources: Mapping[str, SourceFile], pool: SourceFiles, workers: int
) -> None:
    """Compare the stored checksum of every record of which a byte was used.

    What the copies did not read of such a record (padding, tensors left out) is read here.
    """
    reads = Spans(outcome.reads)
    touched = [
        (file, record)
        for file in reads.by_file
        for record in sources[file].records
        if record.crc32 is not None and reads.touching(file, record.byte_offset, record.nbytes)
    ]
    spread(
        touched,
        lambda: lambda item: check_record(pool, *item, reads),
        workers,
        lambda _item: None,
    )


def _store_checksums(
    skeleton: Skeleton, outcome: Outcome, directory: Path, pool: SourceFiles
) -> None:
    """Write the CRCs that the output format keeps of its own records."""
    written = Spans(
        (str(directory / name), offset, nbytes, crc)
        for (name, offset), (nbytes, crc) in outcome.windows.items()
    )
    for stored in skeleton.checksums:
        path = directory / stored.file
        crc = record_crc(pool, str(path), stored.byte_offset, stored.nbytes, written)
        for place in stored.places:
            _write(path, memoryview(crc.to_bytes(4, "little")), place)
