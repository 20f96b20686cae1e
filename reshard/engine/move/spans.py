"""Spans: byte ranges of files, with the checksums of their content."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from reshard.system.checksum import combine

LARGEST = 64 << 20
"""Upper limit of a merged span in bytes; a later run compares or repeats this much at a time."""

FileSpan = tuple[str, int, int, int | None]  # file, byte offset, nbytes, crc
Span = tuple[int, int, int | None]  # byte offset, nbytes, crc, within one file


class Spans:
    """A set of byte ranges of files, each with its CRC-32 or None.

    Ranges are added in any order and may overlap. Adjacent ranges are merged at once, so memory
    grows with the number of bytes divided by `LARGEST`, not with the number of copies.

    >>> from reshard.system.checksum import crc32
    >>> spans = Spans([("x", 4, 2, crc32(b"ef")), ("x", 0, 4, crc32(b"abcd"))])
    >>> list(spans) == [("x", 0, 6, crc32(b"abcdef"))]
    True
    """

    def __init__(self, spans: Iterable[FileSpan] = ()) -> None:
        self._files: dict[str, _FileSpans] = {}
        self.update(spans)

    def __iter__(self) -> Iterator[FileSpan]:
        for file, ranges in self._files.items():
            for offset, (nbytes, crc) in ranges.spans.items():
                yield file, offset, nbytes, crc

    @property
    def files(self) -> list[str]:
        """Names of the files that have a range."""
        return list(self._files)

    @property
    def nbytes(self) -> int:
        """Number of bytes covered; a byte in several ranges counts once."""
        return sum(ranges.nbytes for ranges in self._files.values())

    def put(self, file: str, offset: int, nbytes: int, crc: int | None) -> None:
        """Add a range."""
        if nbytes:
            if file not in self._files:
                self._files[file] = _FileSpans()
            self._files[file].put(offset, nbytes, crc)

    def update(self, spans: Iterable[FileSpan]) -> None:
        """Add ranges."""
        for span in spans:
            self.put(*span)

    def find_overlapping(self, file: str, offset: int, nbytes: int) -> list[Span]:
        """Return the ranges that share a byte with the given one, sorted by offset."""
        if file not in self._files:
            return []
        ranges = self._files[file].sort()
        first = bisect_right(ranges.reaches, offset)
        last = bisect_left(ranges.starts, offset + nbytes)
        return [span for span in ranges.spans[first:last] if span[0] + span[1] > offset]

    def covers(self, file: str, offset: int, nbytes: int) -> bool:
        """Return whether every byte of the given range is in one of these ranges."""
        reach = offset
        for start, size, _ in self.find_overlapping(file, offset, nbytes):
            if start > reach:
                return False
            reach = max(reach, start + size)
        return reach >= offset + nbytes

    def find_inside(self, file: str, offset: int, nbytes: int) -> list[Span]:
        """Return the ranges that are inside the given one, sorted by offset."""
        stop = offset + nbytes
        return [
            span
            for span in self.find_overlapping(file, offset, nbytes)
            if offset <= span[0] and span[0] + span[1] <= stop
        ]


class _SortedSpans(NamedTuple):
    """The ranges of a file sorted by offset, with the largest end up to each of them."""

    spans: list[Span]
    starts: list[int]
    reaches: list[int]


class _FileSpans:
    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, int | None]] = {}  # byte offset -> nbytes, crc
        self._ending: dict[int, int] = {}  # end -> byte offset
        self._sorted: _SortedSpans | None = None

    def put(self, offset: int, nbytes: int, crc: int | None) -> None:
        """Add a range and merge it with the ranges next to it."""
        # A range that is already covered by one with the same start adds nothing.
        if offset in self.spans and self.spans[offset][0] >= nbytes:
            return
        self._sorted = None
        before = self._ending.get(offset)
        if before is not None and self._can_join(before, nbytes, crc):
            size, first = self._take(before)
            offset, nbytes, crc = before, size + nbytes, _join_checksums(first, crc, nbytes)
        after = offset + nbytes
        if after in self.spans and self._can_join(after, nbytes, crc):
            size, second = self._take(after)
            nbytes, crc = nbytes + size, _join_checksums(crc, second, size)
        if offset in self.spans:
            # A shorter range with the same start gives way to this one.
            self._take(offset)
        self.spans[offset] = nbytes, crc
        self._ending[offset + nbytes] = offset

    @property
    def nbytes(self) -> int:
        """Number of bytes covered."""
        ranges = self.sort()
        covered, reach = 0, 0
        for (start, nbytes, _), upto in zip(ranges.spans, ranges.reaches, strict=True):
            covered += max(start + nbytes - max(start, reach), 0)
            reach = upto
        return covered

    def sort(self) -> _SortedSpans:
        """Return all ranges, sorted; the result is kept until a range is added."""
        if self._sorted is None:
            spans = sorted((start, nbytes, crc) for start, (nbytes, crc) in self.spans.items())
            reaches = accumulate((start + nbytes for start, nbytes, _ in spans), max)
            self._sorted = _SortedSpans(spans, [span[0] for span in spans], list(reaches))
        return self._sorted

    def _can_join(self, start: int, nbytes: int, crc: int | None) -> bool:
        size, other = self.spans[start]
        # The CRC of a joined range needs those of both parts.
        return (crc is None) == (other is None) and size + nbytes <= LARGEST

    def _take(self, start: int) -> tuple[int, int | None]:
        nbytes, crc = self.spans.pop(start)
        if self._ending.get(start + nbytes) == start:  # another range may end there, too
            del self._ending[start + nbytes]
        return nbytes, crc


def _join_checksums(first: int | None, second: int | None, second_nbytes: int) -> int | None:
    if first is None or second is None:
        return None
    return combine(first, second, second_nbytes)
