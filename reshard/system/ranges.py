"""Byte ranges of files that are fetched together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Range = tuple[str, int, int]  # path or url, byte offset, nbytes

_GAP = 64 << 10  # bytes; ranges with a smaller gap between them are fetched as one
_SPAN = 8 << 20  # bytes; upper limit of a range that is merged from several


def merge_ranges(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield ranges in their order in the files, with those merged that are close together."""
    last: Range | None = None
    for path, offset, nbytes in sorted(ranges):
        if last is not None:
            stop = max(last[1] + last[2], offset + nbytes)
            near = last[0] == path and offset <= last[1] + last[2] + _GAP
            if near and stop - last[1] <= _SPAN:
                last = (path, last[1], stop - last[1])
                continue
            yield last
        last = (path, offset, nbytes)
    if last is not None:
        yield last
