"""Checksums of records (parts of a file that store their own CRC-32).

Copies read and write parts of records in any order. This module combines the CRCs of the parts into
those of whole records and reads only bytes that no copy has moved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

from reshard.core.manifest import Record
from reshard.engine.move.spans import Span, Spans
from reshard.errors import CorruptError
from reshard.system.checksum import crc32, join

_PIECE = 1 << 20  # bytes read at a time


class RangeReader(Protocol):
    """Files of which ranges can be read: sources, outputs, or those that are computed on demand."""

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at an offset of a file."""


def compute_record_crc(pool: RangeReader, file: str, start: int, nbytes: int, spans: Spans) -> int:
    """Return the CRC-32 of a byte range of `file`, using the CRCs in `spans` where possible."""
    return join(_list_parts(pool, file, start, nbytes, spans.find_inside(file, start, nbytes)))


def check_record(pool: RangeReader, file: str, record: Record, reads: Spans) -> None:
    """Compare a record with its stored checksum.

    Raises:
        CorruptError: the checksums differ.
    """
    if compute_record_crc(pool, file, record.byte_offset, record.nbytes, reads) != record.crc32:
        raise CorruptError(
            file,
            f"{record.name} (bytes {record.byte_offset} to"
            f" {record.byte_offset + record.nbytes}) does not match its stored CRC-32",
            "the file was altered after it was saved; fetch it again",
        )


def _list_parts(
    pool: RangeReader, file: str, start: int, nbytes: int, spans: Iterable[Span]
) -> Iterator[tuple[int, int]]:
    """Yield (crc, nbytes) of parts that cover a range; its spans are sorted by offset."""
    at = start
    for offset, size, crc in spans:
        if offset < at or crc is None:
            continue
        if offset > at:
            yield compute_crc(pool, file, at, offset - at), offset - at
        yield crc, size
        at = offset + size
    if start + nbytes > at:
        yield compute_crc(pool, file, at, start + nbytes - at), start + nbytes - at


_local = threading.local()


def compute_crc(pool: RangeReader, file: str, offset: int, nbytes: int) -> int:
    """Read a byte range in pieces and return its CRC-32; each thread reuses one buffer."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_PIECE))
    crc = 0
    for start in range(0, nbytes, _PIECE):
        piece = _local.buffer[: min(_PIECE, nbytes - start)]
        pool.read_into(file, offset + start, piece)
        crc = crc32(piece, crc)
    return crc
