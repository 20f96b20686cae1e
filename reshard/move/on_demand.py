"""Files of a plan whose bytes are computed when they are read: nothing is written.

A file of `OnDemandFiles` has the bytes that `execute` writes to the file of that name. Programs
that load a checkpoint into memory, or serve it, read such files instead of a copy on a disk.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from reshard.errors import DifferentError, IncompleteError
from reshard.files import SourceFiles
from reshard.manifest import OutputFile, SourceFile, StoredChecksum
from reshard.move.fill import Filler
from reshard.move.records import check_record, compute_crc
from reshard.move.spans import Spans
from reshard.planning.planner import Plan, WindowPart
from reshard.threads import parallel_for
from reshard.units import counted

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PARALLEL_BYTES = 8 << 20  # a shorter read is not worth a thread
_ZEROS = bytes(4 << 20)  # copied to bytes that no tensor fills


class OnDemandFiles:
    """The files of a plan. Reads are independent of each other, from any thread.

    Args:
        plan: the files, and the copies that fill them.
        sources: the source files by path.
        pool: the open source files.
        workers: threads of one long read.
        has_checksums: False leaves the checksums that a file stores of its own records zero. To
            compute one, the whole record is read; `torch.load` does not compare them.
    """

    def __init__(
        self,
        plan: Plan,
        sources: Mapping[str, SourceFile],
        pool: SourceFiles,
        *,
        workers: int = 1,
        has_checksums: bool = True,
    ) -> None:
        self.overflowed: Counter[str] = Counter()  # fqn -> finite values made infinite
        self._plan = plan
        self._sources = sources
        self._pool = pool
        self._workers = workers
        self._contents = {file.name: file for file in plan.target.files}
        self._parts: dict[str, _Parts] = {}
        self._reads = Spans()
        self._checked: set[tuple[str, int, int]] = set()  # records that were compared
        self._has_checksums = has_checksums
        self._crcs: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def nbytes(self, name: str) -> int:
        """Return the size of a file.

        Raises:
            IncompleteError: there is no such file.
        """
        return self._find(name).nbytes

    def has_tensors(self, name: str) -> bool:
        """Return whether a file has bytes of tensors; the content of others is known."""
        return name in self._filled

    def open(self, name: str, *, checks: bool = False) -> io.BufferedReader:
        """Return a file as a binary file object for reading.

        Args:
            checks: whether the read that reaches the end of the file makes `check`, and raises its
                errors.

        Raises:
            IncompleteError: there is no such file.
        """
        return io.BufferedReader(_RawFile(self, name, self.nbytes(name), checks=checks))

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """Return a range of a file; shorter at its end.

        Raises:
            ReshardError: as `read_into`.
        """
        data = bytearray(max(min(nbytes, self.nbytes(name) - byte_offset), 0))
        self.read_into(name, byte_offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target``, bytes, with the bytes of a file at ``byte_offset``.

        Raises:
            CorruptError: a source file is too short.
            IncompleteError: there is no such file.
        """
        file, stop = self._find(name), byte_offset + len(target)
        _fill_with_zeros(target)  # what no tensor and no literal fills is zero
        for offset, data in file.literals:
            _overlay(target, byte_offset, offset, data)
        parts = self._parts_of(name)
        # A range can begin inside an element, and copies move whole
        # elements: a cut part is read whole.
        for part in parts.find_cut(byte_offset, stop):
            _overlay(target, byte_offset, part.byte_offset, self._read_part(parts, part))
        self._fill(parts.find_whole(byte_offset, stop), byte_offset, target)
        # Checksums come last: the literals around them have zeros in their place.
        if self._has_checksums:
            for stored in self._checksums.get(name, ()):
                for location in stored.locations:
                    if location < stop and location + 4 > byte_offset:
                        _overlay(target, byte_offset, location, self._compute_checksum(stored))

    def check_records(self) -> None:
        """Compare the stored checksum of each source record whose bytes were all read.

        Raises:
            CorruptError: a record does not match its stored checksum.
        """
        with self._lock:  # other threads add what they read
            for path in self._reads.files:
                for record in self._sources[path].records:
                    span = path, record.byte_offset, record.nbytes
                    is_due = record.crc32 is not None and span not in self._checked
                    if is_due and self._reads.covers(*span):
                        check_record(self._pool, path, record, self._reads)
                        self._checked.add(span)

    def check(self) -> None:
        """Check what was read so far: stored checksums, and casts.

        Raises:
            CorruptError, DifferentError: as `check_records` and `refuse_overflow`.
        """
        self.check_records()
        self.refuse_overflow()

    def refuse_overflow(self) -> None:
        """Refuse what was read if a cast made finite values infinite.

        Raises:
            DifferentError: names the tensor that has most of them.
        """
        with self._lock:
            worst = self.overflowed.most_common(1)
        for fqn, count in worst:
            problem = (
                f"{counted(count, 'finite value')} would become infinite in the target's dtype"
            )
            raise DifferentError(fqn, problem, "load into bf16 or fp32")

    def _find(self, name: str) -> OutputFile:
        if name not in self._contents:
            raise IncompleteError(name, "is not a file of this checkpoint")
        return self._contents[name]

    def _parts_of(self, name: str) -> _Parts:
        with self._lock:
            if name not in self._parts:
                self._parts[name] = _Parts(self._plan.list_parts(name))
            return self._parts[name]

    @cached_property
    def _filled(self) -> frozenset[str]:
        return frozenset(self._plan.list_files())

    @cached_property
    def _checksums(self) -> Mapping[str, list[StoredChecksum]]:
        by_file: dict[str, list[StoredChecksum]] = defaultdict(list)
        for stored in self._plan.target.checksums:
            by_file[stored.file].append(stored)
        return by_file

    def _fill(self, parts: list[WindowPart], start: int, target: memoryview) -> None:
        """Fill the parts that are whole inside ``target``, which begins at byte ``start``."""
        workers = self._workers if len(target) >= _PARALLEL_BYTES else 1
        fillers: list[Filler] = []

        def fill_parts() -> _FillPart:
            fillers.append(Filler(self._pool, needs_checksum=self._needs_checksum))
            return _FillPart(fillers[-1], start, target)

        parallel_for(parts, fill_parts, min(workers, max(len(parts), 1)))
        with self._lock:
            for filler in fillers:
                filler.flush_checksum()
                self._reads.update(filler.reads)
                self.overflowed.update(filler.overflowed)

    def _needs_checksum(self, path: str) -> bool:
        return path in self._sources and self._sources[path].has_checksums

    def _read_part(self, parts: _Parts, part: WindowPart) -> bytes:
        """Return the bytes of a part; the last one is kept, because readers often go on in it."""
        # The pair is read and replaced as one object, so threads need no lock.
        kept, data = parts.last
        if kept is not part:
            buffer = bytearray(part.nbytes)
            self._fill([part], part.byte_offset, memoryview(buffer))
            data = bytes(buffer)
            parts.last = part, data
        return data

    def _compute_checksum(self, stored: StoredChecksum) -> bytes:
        """Return the CRC-32 of a record, as the file stores it; its bytes are read for it once."""
        key = stored.file, stored.byte_offset
        if key not in self._crcs:
            # No record contains its own checksum, so this reading does
            # not call `_compute_checksum` for it.
            crc = compute_crc(self, stored.file, stored.byte_offset, stored.nbytes)
            self._crcs[key] = crc.to_bytes(4, "little")
        return self._crcs[key]


class _RawFile(io.RawIOBase):
    """One file for reading, with a position; made by `OnDemandFiles.open`."""

    def __init__(self, files: OnDemandFiles, name: str, nbytes: int, *, checks: bool) -> None:
        super().__init__()
        self._checks = checks
        self.name = name
        self._files = files
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position as `io.IOBase.seek` does; return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer from the position on; return the number of bytes, fewer at the end.

        Raises:
            ReshardError: as `OnDemandFiles.read_into`, and `OnDemandFiles.check` at the end.
        """
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._nbytes - self._at), 0)
        self._files.read_into(self.name, self._at, view[:count])
        self._at += count
        if self._checks and count and self._at == self._nbytes:
            self._files.check()
        return count


class _Parts:
    """The parts of one file in order, and the last one that was read in pieces."""

    def __init__(self, parts: list[WindowPart]) -> None:
        self.last: tuple[WindowPart | None, bytes] = None, b""
        self._parts = parts
        self._starts = [part.byte_offset for part in parts]

    def find_whole(self, start: int, stop: int) -> list[WindowPart]:
        """Return the parts that are inside a range of bytes."""
        return [part for part in self._find(start, stop) if _is_inside(part, start, stop)]

    def find_cut(self, start: int, stop: int) -> list[WindowPart]:
        """Return the parts that a range of bytes cuts: at most one at each end."""
        return [part for part in self._find(start, stop) if not _is_inside(part, start, stop)]

    def _find(self, start: int, stop: int) -> list[WindowPart]:
        """Return the parts that share a byte with a range."""
        # The last part that begins before the range can reach into it.
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_right(self._starts, stop - 1)
        return [part for part in self._parts[first:last] if part.byte_offset + part.nbytes > start]


class _FillPart:
    """A function that fills parts in a buffer that begins at byte ``start`` of the file."""

    def __init__(self, filler: Filler, start: int, target: memoryview) -> None:
        self._filler = filler
        self._start = start
        self._target = target

    def __call__(self, part: WindowPart) -> None:
        for copy in part.plan_copies(part.byte_offset - self._start):
            self._filler.fill(copy, self._target)


def _is_inside(part: WindowPart, start: int, stop: int) -> bool:
    return start <= part.byte_offset and part.byte_offset + part.nbytes <= stop


def _fill_with_zeros(target: memoryview) -> None:
    for at in range(0, len(target), len(_ZEROS)):
        target[at : at + len(_ZEROS)] = _ZEROS[: len(target) - at]


def _overlay(target: memoryview, start: int, offset: int, data: bytes) -> None:
    """Copy bytes at an offset of a file into a buffer that begins at byte ``start`` of it."""
    low, high = max(start, offset), min(start + len(target), offset + len(data))
    if low < high:
        target[low - start : high - start] = data[low - offset : high - offset]
