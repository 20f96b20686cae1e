"""Ranged reads: large ones as they are asked for, small ones out of blocks that are kept a while.

A header costs dozens of small reads that lie close together; each would be a round trip. They are
answered from blocks of 256 KiB, of which the last few are kept. Where a reader knows what it will
ask for, `RemoteFiles.expect` fetches that at once, side by side.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from reshard.errors import CorruptError, IncompleteError, ReshardError
from reshard.remote.attempts import attempt
from reshard.remote.store import Store, store_of, version_of

_BLOCK = 256 << 10
_KEPT = 64  # blocks of a process: 16 MiB
_SMALL = 64 << 10  # reads below are answered from blocks
_GAP = 64 << 10  # bytes that are fetched with what lies around them
_SPAN = 8 << 20  # the most that is fetched as one

Range = tuple[str, int, int]  # url, byte offset, nbytes


class ShortError(OSError):
    """A body ended before it should have: the same request may do better."""


class _Blocks:
    """The last blocks that were read, of all files; safe for threads."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, object, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, object, int]) -> bytes | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: tuple[str, object, int], data: bytes) -> None:
        with self._lock:
            self._held[key] = data
            while len(self._held) > _KEPT:
                self._held.popitem(last=False)


_blocks = _Blocks()


class RemoteFile:
    """One object, read by ranges."""

    def __init__(self, url: str) -> None:
        self._store = store_of(url)
        info = self._store.find(url)
        if info is None:
            raise IncompleteError(url, "is not there", "was the checkpoint moved?")
        self.url = url
        self.nbytes: int = info["size"]
        self._version = version_of(info)

    def pread(self, target: memoryview, byte_offset: int) -> int:
        """Fill the target from an offset on, as far as the object goes; how many bytes came."""
        nbytes = max(0, min(len(target), self.nbytes - byte_offset))
        if nbytes >= _SMALL:
            target[:nbytes] = fetch(self._store, self.url, byte_offset, nbytes)
            return nbytes
        done = 0
        while done < nbytes:
            index, start = divmod(byte_offset + done, _BLOCK)
            piece = self._block(index)[start : start + nbytes - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
        return nbytes

    def _block(self, index: int) -> bytes:
        key = (self.url, self._version, index)
        data = _blocks.get(key)
        if data is None:
            start = index * _BLOCK
            nbytes = min(_BLOCK, self.nbytes - start)
            data = fetch(self._store, self.url, start, nbytes)
            _blocks.put(key, data)
        return data


def fetch(store: Store, url: str, byte_offset: int, nbytes: int) -> bytes:
    """Exactly these bytes of an object.

    Raises:
        CorruptError: it is shorter than it was.
        ReshardError: it cannot be read.
    """
    return fetched(store, [(url, byte_offset, nbytes)])[0]


def fetched(store: Store, ranges: Sequence[Range]) -> list[bytes]:
    """Several ranges side by side, each exactly.

    Raises:
        CorruptError, ReshardError: as `fetch`.
    """
    found: dict[int, bytes] = {}
    url = ranges[0][0]

    def request() -> None:
        waiting = [number for number in range(len(ranges)) if number not in found]
        results = store.files.cat_ranges(
            [store.name_of(ranges[number][0]) for number in waiting],
            [ranges[number][1] for number in waiting],
            [ranges[number][1] + ranges[number][2] for number in waiting],
            on_error="return",
        )
        failure: Exception | None = None
        for number, result in zip(waiting, results, strict=True):
            _, offset, nbytes = ranges[number]
            if isinstance(result, Exception):
                failure = result
            elif len(result) != nbytes:
                failure = ShortError(f"{len(result)} of {nbytes} bytes at {offset} came")
            else:
                found[number] = bytes(result)
        if failure is not None:
            raise failure

    try:
        attempt(url, request, "cannot be read")
    except ReshardError:
        _refuse_shorter(store, [ranges[n] for n in range(len(ranges)) if n not in found])
        raise
    return [found[number] for number in range(len(ranges))]


def _refuse_shorter(store: Store, ranges: Sequence[Range]) -> None:
    """Say so where a read failed because the object is not the one that was listed."""
    url, offset, nbytes = max(ranges, key=lambda each: each[1] + each[2])
    info = store.info(url)
    if info is not None and info["size"] < offset + nbytes:
        raise CorruptError(
            url,
            f"{nbytes} bytes expected at {offset}, the object has {info['size']}",
            "it became shorter while it was read: is a job still writing to it?",
        )


class RemoteFiles:
    """Objects that are read, and ranges fetched before they were asked for. Safe for threads."""

    def __init__(self) -> None:
        self._files: dict[str, RemoteFile] = {}
        self._kept: dict[str, dict[int, bytes]] = {}  # url -> offset -> what was fetched there
        self._starts: dict[str, list[int]] = {}  # the offsets in order
        self._lock = threading.Lock()

    def read_into(self, url: str, byte_offset: int, target: memoryview) -> None:
        """Fill the target with the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as `files.OpenFiles.read_into`.
        """
        if url in self._kept and self._take(url, byte_offset, target):
            return
        file = self._files.get(url)
        if file is None:
            file = self._files[url] = RemoteFile(url)
        count = file.pread(target, byte_offset)
        if count < len(target):
            raise CorruptError(
                url,
                f"{len(target)} bytes expected at {byte_offset}, the object ends after {count}",
                "it became shorter while it was read: is a job still writing to it?",
            )

    def expect(self, ranges: Iterable[Range]) -> list[Range]:
        """Fetch ranges side by side, neighbours as one; what is kept until `drop`."""
        spans = list(_spans(ranges))
        if spans:
            for span, data in zip(spans, fetched(store_of(spans[0][0]), spans), strict=True):
                self._keep(span, data)
        return spans

    def drop(self, kept: Iterable[Range]) -> None:
        """Keep no longer what `expect` fetched."""
        with self._lock:
            for url, start, nbytes in kept:
                if len(self._kept.get(url, {}).get(start, b"")) == nbytes:
                    del self._kept[url][start]
                    self._starts[url].remove(start)

    def _keep(self, span: Range, data: bytes) -> None:
        url, start, _ = span
        with self._lock:
            spans = self._kept.setdefault(url, {})
            if start not in spans:
                insort(self._starts.setdefault(url, []), start)
            if len(data) > len(spans.get(start, b"")):
                spans[start] = data

    def _take(self, url: str, byte_offset: int, target: memoryview) -> bool:
        """Fill the target from what is kept, if it holds all of it."""
        with self._lock:
            starts = self._starts[url]
            at = bisect_right(starts, byte_offset) - 1
            if at < 0:
                return False
            start, data = starts[at], self._kept[url][starts[at]]
        first = byte_offset - start
        if first + len(target) > len(data):
            return False
        target[:] = memoryview(data)[first : first + len(target)]
        return True


def _spans(ranges: Iterable[Range]) -> Iterable[Range]:
    """Ranges joined where they lie close together."""
    last: Range | None = None
    for url, offset, nbytes in sorted(ranges):
        if last is not None:
            stop = max(last[1] + last[2], offset + nbytes)
            near = last[0] == url and offset <= last[1] + last[2] + _GAP
            if near and stop - last[1] <= _SPAN:
                last = (url, last[1], stop - last[1])
                continue
            yield last
        last = (url, offset, nbytes)
    if last is not None:
        yield last
