"""Byte ranges of files, with checksums of what is in them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from reshard.checksum import combine

LARGEST = 64 << 20
"""Bytes of what is joined: what a later run compares, and does again, at a time."""

FileSpan = tuple[str, int, int, int | None]  # file, byte offset, nbytes, crc
Span = tuple[int, int, int | None]  # the same within a file


class Spans:
    """Ranges of files, each with its CRC-32, if it has one.

    They come in any order, and neighbours are joined as they come: what an execution knows of the
    bytes that it moved takes memory by their number over `LARGEST`, not by that of its copies.
    Ranges may lie over one another.

    >>> from reshard.checksum import crc32
    >>> spans = Spans([("x", 4, 2, crc32(b"ef")), ("x", 0, 4, crc32(b"abcd"))])
    >>> list(spans) == [("x", 0, 6, crc32(b"abcdef"))]
    True
    """

    def __init__(self, spans: Iterable[FileSpan] = ()) -> None:
        self._files: dict[str, _OfFile] = {}
        self.update(spans)

    def __iter__(self) -> Iterator[FileSpan]:
        for file, held in self._files.items():
            for offset, (nbytes, crc) in held.spans.items():
                yield file, offset, nbytes, crc

    @property
    def files(self) -> list[str]:
        """Those that have a range."""
        return list(self._files)

    @property
    def nbytes(self) -> int:
        """Of all of them; what lies in several counts once."""
        return sum(held.nbytes for held in self._files.values())

    def put(self, file: str, offset: int, nbytes: int, crc: int | None) -> None:
        """Add a range."""
        if nbytes:
            if file not in self._files:
                self._files[file] = _OfFile()
            self._files[file].put(offset, nbytes, crc)

    def update(self, spans: Iterable[FileSpan]) -> None:
        """Add ranges."""
        for span in spans:
            self.put(*span)

    def touching(self, file: str, offset: int, nbytes: int) -> list[Span]:
        """Those that share a byte with a range, by their offsets."""
        if file not in self._files:
            return []
        held = self._files[file].in_order()
        first = bisect_right(held.reaches, offset)
        last = bisect_left(held.starts, offset + nbytes)
        return [span for span in held.spans[first:last] if span[0] + span[1] > offset]

    def cover(self, file: str, offset: int, nbytes: int) -> bool:
        """Whether every byte of a range is in one of them."""
        reach = offset
        for start, size, _ in self.touching(file, offset, nbytes):
            if start > reach:
                return False
            reach = max(reach, start + size)
        return reach >= offset + nbytes

    def within(self, file: str, offset: int, nbytes: int) -> list[Span]:
        """Those that lie inside a range, by their offsets."""
        stop = offset + nbytes
        return [
            span
            for span in self.touching(file, offset, nbytes)
            if offset <= span[0] and span[0] + span[1] <= stop
        ]


class _InOrder(NamedTuple):
    """Ranges of a file by their offsets, and how far those up to each reach."""

    spans: list[Span]
    starts: list[int]
    reaches: list[int]


class _OfFile:
    """Ranges of one file."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, int | None]] = {}  # byte offset -> nbytes, crc
        self._ending: dict[int, int] = {}  # where one ends -> where it starts
        self._sorted: _InOrder | None = None

    def put(self, offset: int, nbytes: int, crc: int | None) -> None:
        """Add one, joined to those that it touches."""
        if offset in self.spans and self.spans[offset][0] >= nbytes:
            return
        self._sorted = None
        before = self._ending.get(offset)
        if before is not None and self._joins(before, nbytes, crc):
            size, first = self._take(before)
            offset, nbytes, crc = before, size + nbytes, _joined(first, crc, nbytes)
        after = offset + nbytes
        if after in self.spans and self._joins(after, nbytes, crc):
            size, second = self._take(after)
            nbytes, crc = nbytes + size, _joined(crc, second, size)
        if offset in self.spans:
            self._take(offset)
        self.spans[offset] = nbytes, crc
        self._ending[offset + nbytes] = offset

    @property
    def nbytes(self) -> int:
        """How many bytes are in one of them."""
        held = self.in_order()
        found, reach = 0, 0
        for (start, nbytes, _), upto in zip(held.spans, held.reaches, strict=True):
            found += max(start + nbytes - max(start, reach), 0)
            reach = upto
        return found

    def in_order(self) -> _InOrder:
        """All of them, to be searched."""
        if self._sorted is None:
            spans = sorted((start, nbytes, crc) for start, (nbytes, crc) in self.spans.items())
            reaches = accumulate((start + nbytes for start, nbytes, _ in spans), max)
            self._sorted = _InOrder(spans, [span[0] for span in spans], list(reaches))
        return self._sorted

    def _joins(self, start: int, nbytes: int, crc: int | None) -> bool:
        size, other = self.spans[start]
        return (crc is None) == (other is None) and size + nbytes <= LARGEST

    def _take(self, start: int) -> tuple[int, int | None]:
        nbytes, crc = self.spans.pop(start)
        if self._ending.get(start + nbytes) == start:
            del self._ending[start + nbytes]
        return nbytes, crc


def _joined(first: int | None, second: int | None, second_nbytes: int) -> int | None:
    if first is None or second is None:
        return None
    return combine(first, second, second_nbytes)
