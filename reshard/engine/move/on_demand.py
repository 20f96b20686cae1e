"""Files of a plan whose bytes are computed when they are read: nothing is written.

A file of `OnDemandFiles` has the bytes that `execute` writes to the file of that name. Programs
that load a checkpoint into memory, or read a mounted directory, read such files instead of a copy
on a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from reshard.core.manifest import OutputFile, SourceFile, StoredChecksum
from reshard.engine.move.fill import Filler
from reshard.engine.move.options import OnOverflow
from reshard.engine.move.records import check_record, compute_crc
from reshard.engine.move.spans import Spans
from reshard.engine.planning.planner import Plan, WindowPart
from reshard.errors import DifferentError, IncompleteError
from reshard.system.files import SourceFiles
from reshard.system.ranges import RangeStream
from reshard.system.threads import parallel_for
from reshard.units import counted
from reshard.version import __version__

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PARALLEL_BYTES = 8 << 20  # a shorter read is not worth a thread
_MOST_LITERALS = 16  # files whose literals are kept
_ZEROS = bytes(4 << 20)  # copied to bytes that no tensor fills
_logger = logging.getLogger("reshard")


class OnDemandFiles:
    """The files of a plan. Reads are independent of each other, from any thread.

    Args:
        plan: the files, and the copies that fill them.
        sources: the source files by path.
        pool: the open source files.
        workers: threads of one long read.
        on_overflow: what to do if a cast makes a finite value infinite. "clamp" and "allow" log a
            warning for each tensor.
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
        on_overflow: OnOverflow = "error",
        has_checksums: bool = True,
    ) -> None:
        self._plan = plan
        self._sources = sources
        self._pool = pool
        self._workers = workers
        self._contents = {file.name: file for file in plan.target.files}
        self._parts: dict[str, _Parts] = {}
        self._literals: dict[str, tuple[tuple[int, bytes], ...]] = {}
        self._reads = Spans()
        self._checked: set[tuple[str, int, int]] = set()  # records that were compared
        self._has_checksums = has_checksums
        self._on_overflow = on_overflow
        # (file, byte offset of a part) -> fqn -> finite values that a cast made infinite
        self._overflows: dict[tuple[str, int], Counter[str]] = {}
        self._logged: set[str] = set()
        self._crcs: dict[tuple[str, int], bytes] = {}
        self._tags: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._fillers = _Fillers(self._make_filler, workers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    @property
    def overflowed(self) -> Counter[str]:
        """The number of finite values that a cast made infinite, by fqn, in what was read."""
        with self._lock:
            return sum(self._overflows.values(), Counter())

    def nbytes(self, name: str) -> int:
        """Return the size of a file.

        Raises:
            IncompleteError: there is no such file.
        """
        return self._find(name).nbytes

    @cached_property
    def changed_ns(self) -> int:
        """When the last of the source files was changed, in nanoseconds; 0 if none is known."""
        versions = (file.version for file in self._sources.values())
        return max((version.changed_ns for version in versions if version), default=0)

    def compute_tag(self, name: str) -> bytes:
        """Return a digest that changes with the content of a file: its layout and its sources.

        Raises:
            IncompleteError: there is no such file.
        """
        if name not in self._tags:
            file = self._find(name)
            digest = hashlib.sha256(self._source_tag)
            digest.update(repr((name, file.nbytes)).encode())
            for offset, data in file.literals:
                digest.update(repr((offset, len(data))).encode() + data)
            self._tags[name] = digest.digest()
        return self._tags[name]

    @cached_property
    def _source_tag(self) -> bytes:
        versions = {
            path: file.version and file.version.to_json() for path, file in self._sources.items()
        }
        return repr((__version__, self._on_overflow, sorted(versions.items()))).encode()

    def has_tensors(self, name: str) -> bool:
        """Return whether a file has bytes of tensors; the content of others is known."""
        return name in self._filled

    def open(self, name: str, *, checks: bool = True) -> io.BufferedReader:
        """Return a file as a binary file object for reading.

        Args:
            checks: whether a read raises DifferentError like `read_into`, and the read that reaches
                the end of the file raises the errors of `check_records`. If not, the caller must
                call `check` after the last read: `torch.load` hides errors of the file that it
                reads.

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
            DifferentError: a cast made a finite value in the range infinite, which is an error by
                default.
            IncompleteError: there is no such file.
        """
        refuse_overflow(self.fill_range(name, byte_offset, target), self._on_overflow)

    def fill_range(self, name: str, byte_offset: int, target: memoryview) -> Counter[str]:
        """Fill ``target`` like `read_into`; return the overflows by fqn, which are no error.

        Raises:
            ReshardError: as `read_into`, except for overflows.
        """
        file, stop = self._find(name), byte_offset + len(target)
        _fill_with_zeros(target)  # what no tensor and no literal fills is zero
        literals = self._list_literals(file)
        first = bisect_right(literals, byte_offset, key=itemgetter(0)) - 1
        for offset, data in islice(literals, max(first, 0), None):
            if offset >= stop:
                break
            _overlay(target, byte_offset, offset, data)
        overflowed = self._fill_tensors(name, byte_offset, target)
        # Checksums come last: the literals around them have zeros in their place.
        if self._has_checksums:
            for stored in file.checksums:
                for location in stored.locations:
                    if location < stop and location + 4 > byte_offset:
                        crc = self._compute_checksum(name, stored)
                        _overlay(target, byte_offset, location, crc)
        return overflowed

    def _list_literals(self, file: OutputFile) -> Sequence[tuple[int, bytes]]:
        with self._lock:
            if file.name not in self._literals:
                if len(self._literals) == _MOST_LITERALS:
                    self._literals.pop(next(iter(self._literals)))
                self._literals[file.name] = tuple(file.literals)
            return self._literals[file.name]

    def _fill_tensors(self, name: str, start: int, target: memoryview) -> Counter[str]:
        # The parts are filled in the order of the file: a computation keeps what the next part
        # needs.
        parts, stop = self._parts_of(name), start + len(target)
        overflowed: Counter[str] = Counter()

        def fill_cut(part: WindowPart) -> None:
            # A range can begin inside an element, and copies move whole elements: a cut part is
            # read whole.
            _overlay(target, start, part.byte_offset, self._read_part(name, parts, part))
            overflowed.update(self._overflows.get((name, part.byte_offset), ()))

        cut = parts.find_cut(start, stop)
        for part in cut:
            if part.byte_offset < start:
                fill_cut(part)
        overflowed.update(self._fill(name, parts.find_whole(start, stop), start, target))
        for part in cut:
            if part.byte_offset >= start:
                fill_cut(part)
        return overflowed

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
                        self._pool.check_read([path])
                        self._checked.add(span)

    def check(self) -> None:
        """Check what was read so far: stored checksums, and casts.

        Raises:
            CorruptError, DifferentError: as `check_records` and `read_into`.
        """
        self.check_records()
        refuse_overflow(self.overflowed, self._on_overflow)

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

    def _fill(
        self, name: str, parts: list[WindowPart], start: int, target: memoryview
    ) -> Counter[str]:
        """``target`` begins at byte ``start``; return the finite values made infinite, by fqn."""
        workers = self._workers if len(target) >= _PARALLEL_BYTES else 1
        acts: list[_FillPart] = []
        overflowed: Counter[str] = Counter()
        with contextlib.ExitStack() as borrowed:

            def fill_parts() -> _FillPart:
                filler = borrowed.enter_context(self._fillers.borrow(name))
                acts.append(_FillPart(filler, start, target))
                return acts[-1]

            parallel_for(parts, fill_parts, min(workers, max(len(parts), 1)))
            self._pool.check_read(file for act in acts for file in act.filler.take_files())
            with self._lock:
                for act in acts:
                    self._reads.update(act.filler.take_reads())
                    for byte_offset, counts in act.overflows.items():
                        self._overflows[name, byte_offset] = counts
                        overflowed += counts
        self._log_overflows(overflowed)
        return overflowed

    def _make_filler(self) -> Filler:
        return Filler(
            self._pool, clamp=self._on_overflow == "clamp", needs_checksum=self._needs_checksum
        )

    def _log_overflows(self, overflowed: Counter[str]) -> None:
        if self._on_overflow == "error":
            return
        with self._lock:
            new = overflowed.keys() - self._logged
            self._logged |= new
        done = "clamped to the largest finite one" if self._on_overflow == "clamp" else "infinite"
        for fqn in sorted(new):
            _logger.warning("overflowed: values of %s became %s", fqn, done)

    def _needs_checksum(self, path: str) -> bool:
        return path in self._sources and self._sources[path].has_checksums

    def _read_part(self, name: str, parts: _Parts, part: WindowPart) -> bytes:
        """Return the bytes of a part; the last one is kept, because readers often go on in it."""
        # The pair is read and replaced as one object, so threads need no lock.
        kept, data = parts.last
        if kept is not part:
            buffer = bytearray(part.nbytes)
            self._fill(name, [part], part.byte_offset, memoryview(buffer))
            data = bytes(buffer)
            parts.last = part, data
        return data

    def _compute_checksum(self, name: str, stored: StoredChecksum) -> bytes:
        key = name, stored.byte_offset
        if key not in self._crcs:
            # No record contains its own checksum, so this reading does
            # not call `_compute_checksum` for it.
            crc = compute_crc(self, name, stored.byte_offset, stored.nbytes)
            self._crcs[key] = crc.to_bytes(4, "little")
        return self._crcs[key]


class _RawFile(RangeStream):
    def __init__(self, files: OnDemandFiles, name: str, nbytes: int, *, checks: bool) -> None:
        super().__init__(nbytes)
        self._checks = checks
        self.name = name
        self._files = files

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position as `io.IOBase.seek` does, but not before the start; return it."""
        self._at = max(super().seek(offset, whence), 0)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer from the position on; return the number of bytes, fewer at the end.

        Raises:
            ReshardError: as `OnDemandFiles.open`.
        """
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._nbytes - self._at), 0)
        if self._checks:
            self._files.read_into(self.name, self._at, view[:count])
        else:
            self._files.fill_range(self.name, self._at, view[:count])
        self._at += count
        if self._checks and count and self._at == self._nbytes:
            self._files.check_records()
        return count


class _Parts:
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
        # The last part that begins before the range can reach into it.
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_right(self._starts, stop - 1)
        return [part for part in self._parts[first:last] if part.byte_offset + part.nbytes > start]


class _Fillers:
    """Fillers that wait for the next read, with what computations keep in them.

    In most programs, a read continues where the last read of the same file ended. If it gets the
    same filler, nothing is computed twice: each of GPT-OSS's experts fills eight parts, and all its
    codes are needed for every part.
    """

    def __init__(self, make: Callable[[], Filler], most: int) -> None:
        self._make = make
        self._most = most
        self._waiting: list[tuple[str, Filler]] = []  # file that it filled last; newest at the end
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, name: str) -> Iterator[Filler]:
        """Lend a filler for a read of a file; one whose read failed is not used again."""
        filler = self._take(name)
        yield filler
        with self._lock:
            self._waiting.append((name, filler))
            del self._waiting[: -self._most]

    def _take(self, name: str) -> Filler:
        with self._lock:
            for number in reversed(range(len(self._waiting))):
                if self._waiting[number][0] == name:
                    return self._waiting.pop(number)[1]
        return self._make()


class _FillPart:
    """A function that fills parts in a buffer that begins at byte ``start`` of the file."""

    def __init__(self, filler: Filler, start: int, target: memoryview) -> None:
        self.filler = filler
        self.overflows: dict[int, Counter[str]] = {}  # by the byte offset of the part
        self._start = start
        self._target = target

    def __call__(self, part: WindowPart) -> None:
        self.filler.overflowed.clear()
        for copy in part.plan_copies(part.byte_offset - self._start):
            self.filler.fill(copy, self._target)
        if self.filler.overflowed:
            self.overflows[part.byte_offset] = self.filler.overflowed.copy()


def refuse_overflow(overflowed: Counter[str], on_overflow: OnOverflow) -> None:
    """Refuse values that a cast made infinite, if they are an error.

    Raises:
        DifferentError: names the tensor that has most of them.
    """
    for fqn, count in overflowed.most_common(1) if on_overflow == "error" else ():
        raise DifferentError(
            fqn,
            f"{counted(count, 'finite value')} would become infinite in the target's dtype",
            "choose dtype bf16 or fp32, or accept it with --on-overflow clamp|allow",
        )


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
