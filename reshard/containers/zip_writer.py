"""Lay out a zip archive of stored members as torch does, before their data are read.

Every member's data begins at a multiple of 64 bytes, after a local header that a padding field
(``FB``, filled with ``Z``) stretches. Sizes and CRC follow the data, in a data descriptor; the
zip64 end records are always there.

Sources: torch 2.13 ``caffe2/serialize/inline_container.cc`` (``getPadding``), its miniz 3.0.2
(``mz_zip_writer_add_mem_ex_v2``, no times); PKWARE APPNOTE.TXT 6.3.10, 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from array import array

from reshard.containers.zip_reader import END, END64, ENTRY, LOCAL, LOCATOR64
from reshard.core.manifest import OutputFile, StoredChecksum
from reshard.system.checksum import crc32

ALIGNMENT = 64
_CENTRAL_CRC = 16  # byte of the CRC in a central directory entry
_UTF8, _DESCRIPTOR_FOLLOWS = 0x0800, 0x0008
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF


class ZipLayout:
    """An archive that grows by one member at a time; ``name`` is that of the file.

    Attributes:
        names: offsets of the members' names in the local headers.
        listed_names: their offsets in the central directory; in the file once it is finished.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._literals: list[tuple[int, bytes]] = []
        self._start = 0  # where the open literal begins
        self._open = bytearray()
        self._central = bytearray()
        self._count = 0
        self.names = array("Q")
        self.listed_names = array("Q")
        # Members whose CRC comes later: offset, nbytes, and the two places of the CRC.
        self._waiting: list[tuple[int, int, int, int]] = []

    def add(self, member: str, data: bytes) -> int:
        """Add a member whose data are known; return the byte at which they begin."""
        return self._add(member, len(data), data)

    def reserve(self, member: str, nbytes: int) -> int:
        """Add a member whose data and CRC come later; return the byte at which the data begin."""
        return self._add(member, nbytes, None)

    def finish(self) -> OutputFile:
        """Return the file with all its literals, and the CRCs that the data's writer fills in."""
        directory, nbytes, count = self._at, len(self._central), self._count
        self.listed_names = array("Q", (directory + name for name in self.listed_names))
        self._open += self._central
        end64 = self._at
        # These values are miniz's: 44 bytes follow the size field; made under Unix by zip 3.0
        # (0x031E); version 4.5, that of zip64, is needed to extract.
        self._open += END64.pack(
            b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, nbytes, directory
        )
        self._open += LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1)
        short = min(count, _FULL16)
        self._open += END.pack(
            b"PK\x05\x06", 0, 0, short, short, min(nbytes, _FULL32), min(directory, _FULL32), 0
        )
        size = self._at
        self._close(0)
        checksums = tuple(
            StoredChecksum(offset, length, (place, directory + central))
            for offset, length, place, central in self._waiting
        )
        return OutputFile(self.name, size, tuple(self._literals), checksums)

    @property
    def _at(self) -> int:
        return self._start + len(self._open)

    def _close(self, hole: int) -> None:
        """End the open literal; the next begins ``hole`` bytes later."""
        if self._open:
            self._literals.append((self._start, bytes(self._open)))
        self._start = self._at + hole
        self._open = bytearray()

    def _add(self, member: str, nbytes: int, data: bytes | None) -> int:
        name, header = member.encode(), self._at
        self.names.append(header + LOCAL.size)
        crc = 0 if data is None else crc32(data)
        # miniz writes no data descriptor behind an empty member.
        flags = _UTF8 | (_DESCRIPTOR_FOLLOWS if nbytes else 0)
        wide = _build_zip64(nbytes, 0, header)  # torch does not know the packed size yet
        padding = _build_padding(header + LOCAL.size + len(name) + len(wide))
        self._open += LOCAL.pack(
            b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(wide) + len(padding)
        )
        self._open += name + wide + padding
        start = self._at
        if data is None:
            self._close(nbytes)
        self._open += data or b""
        if nbytes:
            self._open += b"PK\x07\x08" + crc.to_bytes(4, "little")
            self._open += struct.pack("<2Q" if wide else "<2I", nbytes, nbytes)
        if nbytes and data is None:
            # The CRC is in the data descriptor behind its signature, and in the directory.
            places = start + nbytes + 4, len(self._central) + _CENTRAL_CRC
            self._waiting.append((start, nbytes, *places))
        self._list(name, flags, crc, nbytes, header)
        return start

    def _list(self, name: bytes, flags: int, crc: int, nbytes: int, header: int) -> None:
        wide = _build_zip64(nbytes, nbytes, header)
        size = min(nbytes, _FULL32)
        offset = min(header, _FULL32)
        self._central += ENTRY.pack(
            *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, size, size),
            *(len(name), len(wide), 0, 0, 0, 0, offset),
        )
        self.listed_names.append(len(self._central))
        self._central += name + wide
        self._count += 1


def _build_zip64(nbytes: int, packed: int, header: int) -> bytes:
    values = [nbytes, packed] if nbytes >= _FULL32 else []
    if header >= _FULL32:
        values.append(header)
    count = len(values)
    return struct.pack(f"<2H{count}Q", 1, 8 * count, *values) if values else b""


def _build_padding(at: int) -> bytes:
    size = -(at + 4) % ALIGNMENT  # the field's own tag and length have 4 bytes
    return struct.pack("<2sH", b"FB", size) + b"Z" * size
