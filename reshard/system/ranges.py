"""Byte ranges of files that are fetched together, and those that were fetched in advance."""

from __future__ import annotations

import io
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator

Range = tuple[str, int, int]  # path or url, byte offset, nbytes

_GAP = 64 << 10  # bytes; ranges with a smaller gap between them are fetched as one
_SPAN = 8 << 20  # bytes; upper limit of a range that is merged from several


def merge_ranges(ranges: Iterable[Range], gap: int = _GAP) -> Iterator[Range]:
    """Yield ranges in their order in the files, with those merged that are close together.

    Args:
        ranges: in any order; they may overlap.
        gap: upper limit of the bytes in between.
    """
    last: Range | None = None
    for path, offset, nbytes in sorted(ranges):
        if last is not None:
            stop = max(last[1] + last[2], offset + nbytes)
            near = last[0] == path and offset <= last[1] + last[2] + gap
            if near and stop - last[1] <= _SPAN:
                last = (path, last[1], stop - last[1])
                continue
            yield last
        last = (path, offset, nbytes)
    if last is not None:
        yield last


class RangeStream(io.RawIOBase):
    """A stream for reading, with a position in bytes of a known number; a subclass reads them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position as `io.IOBase.seek` does; return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = start + offset
        return self._at


class FetchedRanges:
    """The bytes of ranges that were fetched in advance; safe for threads."""

    def __init__(self) -> None:
        self._data: dict[str, dict[int, bytes]] = {}  # path or url -> byte offset -> bytes
        self._starts: dict[str, list[int]] = {}  # path or url -> sorted byte offsets
        self._lock = threading.Lock()

    def put(self, fetched: Range, data: bytes) -> None:
        """Keep the bytes of a range."""
        path, start, _ = fetched
        with self._lock:
            ranges = self._data.setdefault(path, {})
            if start not in ranges:
                insort(self._starts.setdefault(path, []), start)
            if len(data) > len(ranges.get(start, b"")):
                ranges[start] = data

    def drop(self, ranges: Iterable[Range]) -> None:
        """Free ranges."""
        with self._lock:
            for path, start, nbytes in ranges:
                # A longer range from the same offset may have replaced it in the meantime.
                if len(self._data.get(path, {}).get(start, b"")) == nbytes:
                    del self._data[path][start]
                    self._starts[path].remove(start)

    def find(self, path: str, byte_offset: int, nbytes: int) -> bytes | None:
        """Return bytes of a file; None if no kept range contains all of them."""
        if path not in self._data:
            return None
        with self._lock:
            starts = self._starts[path]
            at = bisect_right(starts, byte_offset) - 1
            if at < 0:
                return None
            start, data = starts[at], self._data[path][starts[at]]
        first = byte_offset - start
        return data[first : first + nbytes] if first + nbytes <= len(data) else None
