"""Reading ahead: large requests in the order of the source files, many of them in flight.

A worker that reads block by block waits for each answer: a round trip to a network file system or
an object store. So the ranges that the next items need are sorted, joined and fetched by threads of
their own, whose number follows the waiting requests, not the number of workers. Where reads do not
wait (the page cache, a local disk), the workers read for themselves: a block then stays in a core's
cache from the read to the check. Only small adjacent ranges are fetched together there, too.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from reshard.errors import ReshardError
from reshard.system import signals
from reshard.system.files import SourceFiles
from reshard.system.paths import is_remote
from reshard.system.ranges import Range, merge_ranges
from reshard.system.threads import ThreadGroup, map_files, start_measuring

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
Request = tuple[str, int, memoryview]  # file, byte offset, memory for the bytes

_BUFFERS = 4  # one is used while the others are filled
_BUFFER_BYTES = 32 << 20
AHEAD_BYTES = _BUFFERS * _BUFFER_BYTES
"""The memory that is enough for what is read ahead."""

_LEAST_BYTES = 256 << 10  # a smaller buffer is not worth a thread
_REQUEST_BYTES = 8 << 20
_MOST_READERS = 64
_MOST_RANGES = 1 << 14  # of a group, so that the planned copies take little memory
_GROUP_BYTES = 8 << 20  # of the ranges that are compared, to see if some are small and adjacent
_PROBES = 4  # reads of the first ranges, which show if reads wait
_PROBE_BYTES = 128 << 10
_SMALL = 32 << 10  # bytes; to read so many takes about as long as a system call
_FEWER = 4  # times; small ranges are fetched together if that makes the reads so many times fewer
_SPARSE = 4  # times; and if that fetches at most so many times the bytes that are used
_LONG_WAIT = 0.0005  # seconds
_MUCH = 4  # times
_REMEMBERED = 16  # reads; on a busy machine, some of them wait for other threads
_CHECK_SECONDS = 0.1  # between two looks for a signal


class Pace:
    """A measurement: whether reads wait for a network or a disk, or copy from memory."""

    def __init__(self) -> None:
        self._waited: deque[bool] = deque(maxlen=_REMEMBERED)  # each of the last reads

    @property
    def is_measured(self) -> bool:
        """Whether there was a read."""
        return bool(self._waited)

    @property
    def is_slow(self) -> bool:
        """Whether most of the last reads waited much longer than they copied."""
        return len(self._waited) >= _PROBES and 2 * sum(self._waited) > len(self._waited)

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the read of the `with` block."""
        measure = start_measuring()
        yield
        waited, copied = measure()
        self._waited.append(waited > max(_LONG_WAIT, _MUCH * copied))


class Held:
    """The bytes that were read ahead for an item, which is used in a `with` block; here, none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def find(self, file: str, byte_offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return a range of a file, valid in the `with` block, or None if it was not read ahead."""
        return None


NOTHING = Held()


class _Segment(NamedTuple):
    start: int
    stop: int
    data: memoryview


class _Fetched(Held):
    """The segments that several items need; ``free`` gets the buffer when all items were used."""

    def __init__(
        self,
        buffer: memoryview,
        ranges: Iterable[Range],
        items: int,
        free: Callable[[memoryview], None],
    ) -> None:
        self._buffer = buffer
        self._segments: dict[str, list[_Segment]] = {}
        self._items = items
        self._free = free
        self._lock = threading.Lock()
        self._is_filled = threading.Event()
        left = buffer
        for file, start, nbytes in ranges:
            segment = _Segment(start, start + nbytes, left[:nbytes])
            self._segments.setdefault(file, []).append(segment)
            left = left[nbytes:]
        self._starts = {
            file: [segment.start for segment in all_] for file, all_ in self._segments.items()
        }
        self.requests = [
            (file, start, segment.data[start - segment.start :][:_REQUEST_BYTES])
            for file, segments in self._segments.items()
            for segment in segments
            for start in range(segment.start, segment.stop, _REQUEST_BYTES)
        ]
        self._missing = len(self.requests)
        self._failed = False

    def receive(self, *, is_read: bool) -> None:
        """Note that one more request has ended."""
        with self._lock:
            self._missing -= 1
            self._failed |= not is_read
            if not self._missing:
                self._is_filled.set()

    def __enter__(self) -> Self:
        while not self._is_filled.wait(_CHECK_SECONDS):
            signals.check()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._items -= 1
            is_last = not self._items
        if is_last:
            self._free(self._buffer)

    def find(self, file: str, byte_offset: int, nbytes: int) -> memoryview | None:
        """Return a range of a file; None also if a request failed, which another read explains."""
        starts = self._starts.get(file)
        if starts is None or self._failed:
            return None
        at = bisect_right(starts, byte_offset) - 1
        if at < 0:
            return None
        segment = self._segments[file][at]
        first = byte_offset - segment.start
        if byte_offset + nbytes > segment.stop:
            return None
        return segment.data[first : first + nbytes]


class ReadAhead(Generic[T]):
    """Items in order, each with the bytes that it needs as far as they were read ahead.

    Threads read in the `with` block, and end with it.

    Args:
        pool: the open source files.
        list_ranges: returns the ranges of stored files that an item reads.
        nbytes: upper limit of the memory for what was read ahead.
        workers: the number of threads that use items.
    """

    def __init__(
        self,
        pool: SourceFiles,
        list_ranges: Callable[[T], Sequence[Range]],
        *,
        nbytes: int,
        workers: int,
    ) -> None:
        self.pace = Pace()
        self._pool = pool
        self._list_ranges = list_ranges
        self._workers = workers
        size = min(nbytes // _BUFFERS, _BUFFER_BYTES)
        self._size = size if size >= _LEAST_BYTES else 0
        self._is_slow = False  # once reads have waited, they are made ahead until the end
        self._free: list[memoryview] = []
        self._unmade = _BUFFERS if self._size else 0
        self._changed = threading.Condition()
        self._requests: SimpleQueue[tuple[_Fetched, Request] | None] = SimpleQueue()
        self._unanswered = 0
        self._readers = 0
        self._most_readers = _MOST_READERS
        self._threads = ThreadGroup()
        self._has_ended = False

    def __enter__(self) -> Self:
        self._threads.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended = True
        for _ in range(self._readers):
            self._requests.put(None)
        self._threads.__exit__(*error)

    def iterate(self, items: Iterable[T]) -> Iterator[tuple[T, Held]]:
        """Yield every item with what was read for it; the next one may be asked for at once."""
        groups: deque[tuple[deque[T], Held]] = deque()
        for listed, ranges in self._group((item, self._list_ranges(item)) for item in items):
            groups.append((deque(listed), self._read(ranges, len(listed))))
            # The groups behind the first one are read while it is used, as far as there is memory.
            while groups and not (self._has_buffer() and self._is_slow and len(groups) < _BUFFERS):
                yield from self._use_one(groups)
        while groups:
            yield from self._use_one(groups)

    def _use_one(self, groups: deque[tuple[deque[T], Held]]) -> Iterator[tuple[T, Held]]:
        waiting, held = groups[0]
        item = waiting.popleft()
        if not waiting:
            groups.popleft()
        yield item, held

    def _group(
        self, items: Iterable[tuple[T, Sequence[Range]]]
    ) -> Iterator[tuple[list[T], list[Range]]]:
        group: list[T] = []
        listed: list[Range] = []
        total = 0
        for item, ranges in items:
            nbytes = sum(size for _, _, size in ranges)
            most = self._size if self._is_slow else _GROUP_BYTES
            if group and (total + nbytes > most or len(listed) + len(ranges) > _MOST_RANGES):
                yield group, listed
                group, listed, total = [], [], 0
            group.append(item)
            listed += ranges
            total += nbytes
        if group:
            yield group, listed

    def _read(self, ranges: Sequence[Range], items: int) -> Held:
        if not ranges or not self._size:
            return NOTHING
        self._measure(ranges)
        joined = list(merge_ranges(ranges))
        if not self._is_slow and not _are_small(ranges, joined):
            return NOTHING
        if _sum(joined) > self._size:
            joined = list(merge_ranges(ranges, gap=0))
            if _sum(joined) > self._size:
                return NOTHING
        group = _Fetched(self._take_buffer(), joined, items, self._give_back)
        for request in group.requests:
            self._requests.put((group, request))
        with self._changed:
            self._unanswered += len(group.requests)
            wanted = min(self._unanswered, _MOST_READERS if self._is_slow else self._workers)
        self._start_readers(wanted)
        return group

    def _start_readers(self, wanted: int) -> None:
        while self._readers < min(wanted, self._most_readers):
            try:
                self._threads.start(self._run, "reader")
            except MemoryError:  # the system limits the threads of a user or a job
                if not self._readers:
                    raise
                self._most_readers = self._readers
            else:
                self._readers += 1

    def _measure(self, ranges: Sequence[Range]) -> None:
        if self._is_slow:
            return
        if any(is_remote(file) for file in {file for file, _, _ in ranges}):
            self._is_slow = True
            return
        if not self.pace.is_measured:
            map_files(islice(cycle(ranges), _PROBES), self._probe)
        self._is_slow = self.pace.is_slow

    def _probe(self, place: Range) -> None:
        file, start, nbytes = place
        local = self._pool.open(file)
        with self.pace.measure():
            local.read(start, min(nbytes, _PROBE_BYTES))

    def _has_buffer(self) -> bool:
        return bool(self._free or self._unmade)

    def _take_buffer(self) -> memoryview:
        with self._changed:
            while not self._has_buffer():
                signals.check()
                self._changed.wait(_CHECK_SECONDS)
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        try:  # pages that are not used take no memory and no time, unlike those of a bytearray
            return memoryview(mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except OSError as error:
            raise MemoryError(f"no memory to read ahead: {error.strerror}") from error

    def _give_back(self, buffer: memoryview) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def _run(self) -> None:
        while (asked := self._requests.get()) is not None:
            group, (file, start, data) = asked
            is_read = False
            try:
                # After an error, the worker reads its own range once more, and that explains it.
                with contextlib.suppress(ReshardError):
                    if not self._has_ended:
                        self._pool.read_into(file, start, data)
                        is_read = True
            finally:
                group.receive(is_read=is_read)
                with self._changed:
                    self._unanswered -= 1


def _sum(ranges: Iterable[Range]) -> int:
    return sum(nbytes for _, _, nbytes in ranges)


def _are_small(ranges: Sequence[Range], joined: Sequence[Range]) -> bool:
    nbytes = _sum(ranges)
    return (
        nbytes <= len(ranges) * _SMALL
        and _FEWER * len(joined) <= len(ranges)
        and _sum(joined) <= _SPARSE * nbytes
    )
