"""Ranged reads: large reads go to the store directly, small ones use a cache of blocks.

Reading a header takes dozens of small reads close together, and each would be a round trip. They
are answered from cached blocks of 256 KiB. If a reader knows in advance what it will read,
`RemoteFiles.fetch` gets all of that concurrently.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import CorruptError, IncompleteError, ReshardError
from reshard.system.ranges import Range
from reshard.system.remote.attempts import attempt
from reshard.system.remote.store import Store, find_store, find_version
from reshard.system.versions import FileVersion, Versioned, refuse_change

_BLOCK = 256 << 10
_KEPT = 64  # blocks in the cache of a process: 16 MiB
_SMALL = 64 << 10  # bytes; smaller reads use the cache


class ShortBodyError(OSError):
    """A response was shorter than requested; the same request may succeed next time."""


class _BlockCache:
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
    """One version of an object, read by ranges.

    Args:
        version: the version to read; by default the present one.
    """

    def __init__(self, url: str, version: FileVersion | None = None) -> None:
        self._store = find_store(url)
        if version is None:
            info = self._store.find(url)
            if info is None:
                raise IncompleteError(url, "does not exist", "was the checkpoint moved?")
            version = find_version(info)
        self.url = url
        self.nbytes = version.nbytes
        self.version = version

    def pread(self, target: memoryview, byte_offset: int) -> int:
        """Fill the target from an offset on and return the number of bytes before the end."""
        nbytes = max(0, min(len(target), self.nbytes - byte_offset))
        if nbytes >= _SMALL:
            target[:nbytes] = self.fetch(byte_offset, nbytes)
            return nbytes
        done = 0
        while done < nbytes:
            # The last block also has the rest of the object, where archives have their directory.
            index = min((byte_offset + done) // _BLOCK, max(0, self.nbytes // _BLOCK - 1))
            start = byte_offset + done - index * _BLOCK
            piece = self._block(index)[start : start + nbytes - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
        return nbytes

    def _block(self, index: int) -> bytes:
        # The blocks of an object that is rewritten get other keys, so two versions are never mixed.
        key = (self.url, self.version, index)
        data = _blocks.get(key)
        if data is None:
            start = index * _BLOCK
            left = self.nbytes - start
            data = self.fetch(start, left if left < 2 * _BLOCK else _BLOCK)
            _blocks.put(key, data)
        return data

    def fetch(self, byte_offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes by a request of their own.

        Raises:
            CorruptError: the object was replaced.
            ReshardError: it cannot be read.
        """
        return self.fetch_all([(byte_offset, nbytes)])[0]

    def fetch_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges (offset, nbytes), which are fetched concurrently.

        Raises:
            CorruptError, ReshardError: as `fetch`.
        """
        places = [(self.url, offset, nbytes) for offset, nbytes in ranges]
        return _fetch_ranges(self._store, places, [self.version] * len(places))

    def check(self) -> None:
        """Check that the store still has this version, unless each read has checked it.

        Raises:
            CorruptError: the object was replaced.
        """
        if not self._store.pins(self.version):
            _refuse_changed(self._store, self.url, self.version)


def _fetch_ranges(
    store: Store, ranges: Sequence[Range], versions: Sequence[FileVersion]
) -> list[bytes]:
    # A repeated request asks only for the ranges that have not arrived.
    received: dict[int, bytes] = {}
    url = ranges[0][0]

    def request() -> None:
        waiting = [number for number in range(len(ranges)) if number not in received]
        results = store.read_ranges(
            [ranges[number] for number in waiting], [versions[number] for number in waiting]
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
        missing = (number for number in range(len(ranges)) if number not in received)
        for url, version in {ranges[number][0]: versions[number] for number in missing}.items():
            _refuse_changed(store, url, version)
        raise
    return [received[number] for number in range(len(ranges))]


def _refuse_changed(store: Store, url: str, version: FileVersion) -> None:
    info = store.info(url)
    if info is not None:  # a removed object cannot be read, which is another error
        refuse_change(url, version, find_version(info))


class RemoteFiles:
    """A pool of objects; safe for threads.

    Args:
        versions: the files by URL whose versions are fixed, as in `reshard.system.files`.
    """

    def __init__(self, versions: Mapping[str, Versioned]) -> None:
        self._versions = versions
        self._files: dict[str, RemoteFile] = {}

    def read_into(self, url: str, byte_offset: int, target: memoryview) -> None:
        """Fill the target with the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `files.OpenFiles.read_into`.
        """
        count = self.open(url).pread(target, byte_offset)
        if count < len(target):
            raise CorruptError(
                url,
                f"{len(target)} bytes were expected at offset {byte_offset}, but the object ends"
                f" after {count} of them",
                "it became shorter while it was read: is a job still writing to it?",
            )

    def open(self, url: str) -> RemoteFile:
        """Return the version of an object that is read.

        Raises:
            IncompleteError: there is no such object.
        """
        file = self._files.get(url)
        if file is None:
            known = self._versions.get(url)
            file = RemoteFile(url, known.version if known else None)
            file = self._files.setdefault(url, file)  # another thread may have been faster
        return file

    def check(self, urls: Iterable[str] | None = None) -> None:
        """Check that the store still has the versions of these objects, by default of all.

        Raises:
            CorruptError: an object was replaced.
        """
        for url in list(self._files) if urls is None else urls:
            self.open(url).check()

    def check_unread(self, urls: Iterable[str]) -> None:
        """Check that the store still lists the versions of objects that this pool did not read.

        Raises:
            CorruptError: an object was replaced.
        """
        unread = [url for url in urls if url not in self._files]
        for store in {find_store(url) for url in unread}:
            store.forget()
        for url in unread:
            info, version = find_store(url).find(url), self._versions[url].version
            if info is not None and version is not None:
                refuse_change(url, version, find_version(info))

    def fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of ranges, fetched concurrently.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `read_into`.
        """
        versions = [self.open(url).version for url, _, _ in ranges]
        return _fetch_ranges(find_store(ranges[0][0]), ranges, versions)
