"""Ranged reads: large reads go to the store directly, small ones use a cache of blocks.

Reading a header takes dozens of small reads close together, and each would be a round trip. They
are answered from cached blocks of 256 KiB. If a reader knows in advance what it will read,
`RemoteFiles.prefetch` fetches all of that concurrently.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from reshard.errors import CorruptError, IncompleteError, ReshardError
from reshard.system.ranges import Range
from reshard.system.remote.attempts import attempt
from reshard.system.remote.store import Store, find_store, get_version

_BLOCK = 256 << 10
_KEPT = 64  # blocks in the cache of a process: 16 MiB
_SMALL = 64 << 10  # bytes; smaller reads use the cache


class ShortBodyError(OSError):
    """A response was shorter than requested; the same request may succeed next time."""


class _BlockCache:
    """A cache of the most recently used blocks of all files; safe for threads."""

    def __init__(self) -> None:
        self._data: OrderedDict[tuple[str, object, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, object, int]) -> bytes | None:
        with self._lock:
            if key in self._data:
                self._data.move_to_end(key)
            return self._data.get(key)

    def put(self, key: tuple[str, object, int], data: bytes) -> None:
        with self._lock:
            self._data[key] = data
            while len(self._data) > _KEPT:
                self._data.popitem(last=False)


_blocks = _BlockCache()


class RemoteFile:
    """One object, read by ranges."""

    def __init__(self, url: str) -> None:
        self._store = find_store(url)
        info = self._store.find(url)
        if info is None:
            raise IncompleteError(url, "does not exist", "was the checkpoint moved?")
        self.url = url
        self.nbytes: int = info["size"]
        self._version = get_version(info)

    def pread(self, target: memoryview, byte_offset: int) -> int:
        """Fill the target from an offset on and return the number of bytes before the end."""
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
        # The blocks of an object that is rewritten get other keys, so two versions are never mixed.
        key = (self.url, self._version, index)
        data = _blocks.get(key)
        if data is None:
            start = index * _BLOCK
            nbytes = min(_BLOCK, self.nbytes - start)
            data = fetch(self._store, self.url, start, nbytes)
            _blocks.put(key, data)
        return data


def fetch(store: Store, url: str, byte_offset: int, nbytes: int) -> bytes:
    """Return exactly `nbytes` bytes of an object.

    Raises:
        CorruptError: the object has become shorter.
        ReshardError: the object cannot be read.
    """
    return _fetch_ranges(store, [(url, byte_offset, nbytes)])[0]


def _fetch_ranges(store: Store, ranges: Sequence[Range]) -> list[bytes]:
    """Return several ranges, each complete, which are fetched concurrently."""
    # A repeated request asks only for the ranges that have not arrived.
    received: dict[int, bytes] = {}
    url = ranges[0][0]

    def request() -> None:
        waiting = [number for number in range(len(ranges)) if number not in received]
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
                failure = ShortBodyError(f"received {len(result)} of {nbytes} bytes at {offset}")
            else:
                received[number] = bytes(result)
        if failure is not None:
            raise failure

    try:
        attempt(url, request, "cannot be read")
    except ReshardError:
        _refuse_shorter(store, [ranges[n] for n in range(len(ranges)) if n not in received])
        raise
    return [received[number] for number in range(len(ranges))]


def _refuse_shorter(store: Store, ranges: Sequence[Range]) -> None:
    """Raise an error if a read failed because the object has become shorter."""
    url, offset, nbytes = max(ranges, key=lambda each: each[1] + each[2])
    info = store.info(url)
    if info is not None and info["size"] < offset + nbytes:
        raise CorruptError(
            url,
            f"{nbytes} bytes were expected at offset {offset}, but the object has {info['size']}",
            "it became shorter while it was read: is a job still writing to it?",
        )


class RemoteFiles:
    """A pool of objects and of ranges that were fetched in advance; safe for threads."""

    def __init__(self) -> None:
        self._files: dict[str, RemoteFile] = {}
        self._kept: dict[str, dict[int, bytes]] = {}  # url -> offset -> bytes fetched in advance
        self._starts: dict[str, list[int]] = {}  # url -> sorted offsets
        self._lock = threading.Lock()

    def read_into(self, url: str, byte_offset: int, target: memoryview) -> None:
        """Fill the target with the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `files.OpenFiles.read_into`.
        """
        if url in self._kept and self._fill_from_kept(url, byte_offset, target):
            return
        file = self._files.get(url)
        if file is None:
            file = self._files[url] = RemoteFile(url)
        count = file.pread(target, byte_offset)
        if count < len(target):
            raise CorruptError(
                url,
                f"{len(target)} bytes were expected at offset {byte_offset}, but the object ends"
                f" after {count} of them",
                "it became shorter while it was read: is a job still writing to it?",
            )

    def prefetch(self, ranges: list[Range]) -> list[Range]:
        """Fetch ranges concurrently, and return them; they are kept until `drop`."""
        if ranges:
            store = find_store(ranges[0][0])
            for span, data in zip(ranges, _fetch_ranges(store, ranges), strict=True):
                self._store(span, data)
        return ranges

    def drop(self, kept: Iterable[Range]) -> None:
        """Free ranges that `prefetch` has fetched."""
        with self._lock:
            for url, start, nbytes in kept:
                # A longer range from the same offset may have replaced it in the meantime.
                if len(self._kept.get(url, {}).get(start, b"")) == nbytes:
                    del self._kept[url][start]
                    self._starts[url].remove(start)

    def _store(self, span: Range, data: bytes) -> None:
        url, start, _ = span
        with self._lock:
            spans = self._kept.setdefault(url, {})
            if start not in spans:
                insort(self._starts.setdefault(url, []), start)
            if len(data) > len(spans.get(start, b"")):
                spans[start] = data

    def _fill_from_kept(self, url: str, byte_offset: int, target: memoryview) -> bool:
        """Fill the target from a kept range; return False if none contains all of it."""
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
