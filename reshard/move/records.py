"""Checksums that files keep of their own records, from the checksums of the parts moved.

Copies read and write parts of records in any order; here the parts' CRCs are joined to those of
whole records, and only what was not moved is read again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from reshard.checksum import crc32, join
from reshard.errors import CorruptError
from reshard.files import OpenFiles
from reshard.manifest import Record

_PIECE = 1 << 20  # bytes read at a time

Span = tuple[int, int, int]  # byte offset, nbytes, crc


class Spans:
    """Byte ranges of files with their checksums, to be found by place."""

    def __init__(self, ranges: Iterable[tuple[str, int, int, int]]) -> None:
        self.by_file: dict[str, list[Span]] = defaultdict(list)
        for file, offset, nbytes, crc in ranges:
            self.by_file[file].append((offset, nbytes, crc))
        self.starts: dict[str, list[int]] = {}
        self.reaches: dict[str, list[int]] = {}
        for file, spans in self.by_file.items():
            spans.sort()
            self.starts[file] = [span[0] for span in spans]
            self.reaches[file] = list(accumulate((s[0] + s[1] for s in spans), max))

    def touching(self, file: str, offset: int, nbytes: int) -> list[Span]:
        """Those that share a byte with a range."""
        first = bisect_right(self.reaches[file], offset)
        last = bisect_left(self.starts[file], offset + nbytes)
        return [s for s in self.by_file[file][first:last] if s[0] + s[1] > offset]

    def cover(self, file: str, offset: int, nbytes: int) -> bool:
        """Whether every byte of a range is in one of them."""
        if file not in self.by_file:
            return False
        reach = offset
        for start, size, _ in self.touching(file, offset, nbytes):
            if start > reach:
                return False
            reach = max(reach, start + size)
        return reach >= offset + nbytes

    def within(self, file: str, offset: int, nbytes: int) -> list[Span]:
        """Those that lie inside a range."""
        if file not in self.by_file:
            return []
        stop = offset + nbytes
        return [
            s for s in self.touching(file, offset, nbytes) if offset <= s[0] and s[0] + s[1] <= stop
        ]


def record_crc(pool: OpenFiles, file: str, start: int, nbytes: int, spans: Spans) -> int:
    """CRC of a byte range of a file; ``spans`` may call the file by ``file`` only."""
    return join(_tiles(pool, file, start, nbytes, spans.within(file, start, nbytes)))


def check_record(pool: OpenFiles, file: str, record: Record, reads: Spans) -> None:
    """Compare a record with its stored checksum.

    Raises:
        CorruptError: they differ.
    """
    if record_crc(pool, file, record.byte_offset, record.nbytes, reads) != record.crc32:
        raise CorruptError(
            file,
            f"{record.name} (bytes {record.byte_offset} to"
            f" {record.byte_offset + record.nbytes}) does not match its stored CRC-32",
            "the file was altered after it was saved: fetch it again",
        )


def _tiles(
    pool: OpenFiles, file: str, start: int, nbytes: int, spans: Iterable[Span]
) -> Iterator[tuple[int, int]]:
    """(crc, nbytes) of parts that make up a range exactly.

    Spans in order of their offsets, all inside the range; what they leave out or hold twice is
    read.
    """
    at = start
    for offset, size, crc in spans:
        if offset < at:
            continue
        if offset > at:
            yield crc_of(pool, file, at, offset - at), offset - at
        yield crc, size
        at = offset + size
    if start + nbytes > at:
        yield crc_of(pool, file, at, start + nbytes - at), start + nbytes - at


_local = threading.local()


def crc_of(pool: OpenFiles, file: str, offset: int, nbytes: int) -> int:
    """CRC of a byte range, read piece by piece into one buffer a thread."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_PIECE))
    crc = 0
    for start in range(0, nbytes, _PIECE):
        piece = _local.buffer[: min(_PIECE, nbytes - start)]
        pool.read_into(file, offset + start, piece)
        crc = crc32(piece, crc)
    return crc
