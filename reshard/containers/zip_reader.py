"""Read the central directory of a zip archive with stored members, strictly.

``zipfile`` neither gives the offset of a member's data nor refuses members that overlap, and it is
ten times slower on archives of many thousand members. Offsets count from the archive's start.

Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 (layout) and 4.5.3 (zip64 sizes).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from reshard.errors import ALTERED, DAMAGED, CorruptError
from reshard.system.checksum import crc32
from reshard.system.files import Section

END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
_FIELDS = struct.Struct("<10xH4x3I3H8xI").unpack_from  # the fields of an entry that are read
_SIZES = struct.Struct("<2H").unpack_from  # of the name and the extra field in a local header
_MAX_COMMENT = 0xFFFF
_MAX_DIRECTORY = 1 << 30


class ZipMember(NamedTuple):
    """One stored member.

    Args:
        header_offset: where its local header begins.
        limit: the byte at which its data must have ended.
        entry_offset: where its entry in the central directory begins.
    """

    name: str
    nbytes: int
    crc32: int
    header_offset: int
    limit: int
    entry_offset: int

    @property
    def header(self) -> tuple[int, int]:
        """The position of the local header: (offset, nbytes)."""
        return self.header_offset, LOCAL.size

    def data_offset(self, archive: Section) -> int:
        """Return the byte at which the data begin, by the lengths in the local header.

        Raises:
            CorruptError: there is no local header, or the data would run into the next member.
        """
        # torch pads only the extra field of the local header, so the directory does not
        # show where the data begin.
        head = archive.read(self.header_offset, LOCAL.size)
        if not head.startswith(b"PK\x03\x04"):
            raise CorruptError(
                archive.path,
                f"its zip directory places {self.name!r} at byte {self.header_offset}, where no"
                " member starts",
                DAMAGED,
            )
        name_size, extra_size = _SIZES(head, 26)
        start = self.header_offset + LOCAL.size + name_size + extra_size
        if start + self.nbytes > self.limit:
            raise CorruptError(
                archive.path,
                f"member {self.name!r} occupies bytes {start} to {start + self.nbytes}, but must"
                f" end before byte {self.limit}",
                DAMAGED,
            )
        return int(start)

    def read(self, archive: Section, *, checked: bool) -> tuple[int, bytes]:
        """Return the byte at which the data begin, and the data, compared with the CRC if asked.

        Raises:
            CorruptError: the data do not match the CRC.
        """
        start = self.data_offset(archive)
        data = archive.read(start, self.nbytes)
        if checked and crc32(data) != self.crc32:
            raise CorruptError(
                archive.path, f"member {self.name!r} does not match its stored CRC-32", DAMAGED
            )
        return start, data


_make_member = ZipMember._make  # faster than a call of the class


def read_directory(archive: Section) -> dict[str, ZipMember]:
    """Read every member, by name.

    Raises:
        CorruptError: no directory, compressed or overlapping members, offsets past the end.
    """
    path, (count, nbytes, start) = archive.path, _locate(archive)
    if start + nbytes > archive.nbytes or nbytes > _MAX_DIRECTORY:
        raise CorruptError(
            path,
            f"its zip directory occupies bytes {start} to {start + nbytes}, but the file has"
            f" {archive.nbytes}",
            DAMAGED,
        )
    members: dict[str, ZipMember] = {}
    # A member must end where the next one begins, the last one where the directory begins.
    limit = start
    entries = _iterate_entries(path, archive.read(start, nbytes), count)
    for offset, name, member_size, crc, at in sorted(entries, reverse=True):
        if name in members or offset >= limit:
            raise CorruptError(
                path, f"zip member {name!r} is listed twice or overlaps another", ALTERED
            )
        members[name] = _make_member((name, member_size, crc, offset, limit, start + at))
        limit = offset
    return members


def _read_tail(archive: Section) -> tuple[bytes, int]:
    """Return the archive's last bytes, and where the end record begins; torch has no comment."""
    # An archive without a comment, as torch writes it, needs no read of the last 64 KiB.
    for comment in (0, _MAX_COMMENT):
        nbytes = min(archive.nbytes, END.size + comment + LOCATOR64.size)
        tail = archive.read(archive.nbytes - nbytes, nbytes)
        at = tail.rfind(b"PK\x05\x06")
        if 0 <= at <= len(tail) - END.size:
            return tail, at
    raise CorruptError(
        archive.path, f"there is no zip directory at the end of its {archive.nbytes} bytes", DAMAGED
    )


def _locate(archive: Section) -> tuple[int, int, int]:
    path, (tail, at) = archive.path, _read_tail(archive)
    _, _, _, _, count, nbytes, start, _ = END.unpack_from(tail, at)
    locator = at - LOCATOR64.size
    # torch writes the zip64 records into every archive, other programs into large ones.
    if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
        _, _, end64, _ = LOCATOR64.unpack_from(tail, locator)
        if end64 + END64.size > archive.nbytes:
            raise CorruptError(path, "its zip64 directory is beyond the end of the file", DAMAGED)
        fields = END64.unpack(archive.read(end64, END64.size))
        if fields[0] != b"PK\x06\x06":
            raise CorruptError(path, "its zip64 directory is missing", DAMAGED)
        count, nbytes, start = fields[7], fields[8], fields[9]
    return count, nbytes, start


def _iterate_entries(
    path: str, data: bytes, count: int
) -> Iterator[tuple[int, str, int, int, int]]:
    at, length = 0, len(data)
    for _ in range(count):
        first, at = at, at + ENTRY.size
        if at > length or not data.startswith(b"PK\x01\x02", first):
            raise CorruptError(path, f"its zip directory is damaged at byte {first}", DAMAGED)
        method, crc, packed, size, name_size, extra_size, comment_size, offset = _FIELDS(
            data, first
        )
        stop = at + name_size
        name = data[at:stop].decode("utf-8", "replace")
        at = stop + extra_size + comment_size
        if extra_size:
            extra = data[stop : stop + extra_size]
            size, packed, offset = _read_zip64(path, extra, size, packed, offset)
        if method != 0 or size != packed:
            raise CorruptError(
                path, f"zip member {name!r} is compressed; torch.save does not compress", ALTERED
            )
        yield offset, name, size, crc, first


def _read_zip64(
    path: str, extra: bytes, size: int, packed: int, offset: int
) -> tuple[int, int, int]:
    """Return the zip64 values of those fields that are all ones, in their fixed order."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1 and at + 4 + length <= len(extra):
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            values = []
            for value in (size, packed, offset):
                if value == 0xFFFFFFFF and not wide:
                    raise CorruptError(path, "a zip64 size is missing", DAMAGED)
                values.append(wide.pop(0) if value == 0xFFFFFFFF else value)
            return values[0], values[1], values[2]
        at += 4 + length
    return size, packed, offset
