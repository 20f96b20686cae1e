"""Checksums that files keep of their own records, from the checksums of the parts moved.

Copies read and write parts of records in any order; here the parts' CRCs are joined to those of
whole records, and only what was not moved is read again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from reshard.checksum import crc32, join
from reshard.errors import CorruptError
from reshard.files import OpenFiles
from reshard.manifest import Record
from reshard.move.spans import Span, Spans

_PIECE = 1 << 20  # bytes read at a time


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
        if offset < at or crc is None:
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
