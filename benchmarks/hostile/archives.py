"""Damage a zip archive: change its members, or write a wrong central directory."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from benchmarks.hostile import pickles, values

_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")


@dataclass(frozen=True)
class Member:
    """A member to write; None as a value of the directory stands for the correct one."""

    name: bytes
    data: bytes
    method: int = 0
    flags: int = 0
    told_name: bytes | None = None
    told_crc: int | None = None
    told_size: int | None = None
    told_packed: int | None = None
    told_offset: int | None = None
    zip64: bool = False


def damaged(chance: Random, data: bytes) -> bytes:
    """Repack the archive after damage to its pickle, or with a false directory."""
    members = list(unpacked(data))
    if not members:
        return values.raw(chance, data)
    inside = chance.random()
    if inside < 0.75:
        return _with_pickle(chance, members)
    if inside < 0.8:
        at = chance.randrange(len(members))
        made = values.raw(chance, members[at].data)
        members[at] = replace(members[at], data=made)
        return packed(members)
    for _ in range(chance.choice((1, 1, 2))):
        chance.choice(_LIES)(chance, members)
        if not members:
            break
    count = len(members) + chance.choice((0, 0, 0, 0, 1, -1, 60_000))
    return packed(members, count=count, end64=chance.choice((0, 0, 0, 1, 2)))


def of_pickle(chance: Random, data: bytes) -> bytes:
    """Build an archive that is sound except for its pickle, so that readers reach the values."""
    members = list(unpacked(data))
    return _with_pickle(chance, members) if members else values.raw(chance, data)


def _with_pickle(chance: Random, members: list[Member]) -> bytes:
    at = next((i for i, m in enumerate(members) if m.name.endswith(b"data.pkl")), 0)
    members[at] = replace(members[at], data=pickles.damaged(chance, members[at].data))
    return packed(members)


@lru_cache(maxsize=512)  # seeds' archives come again and again
def unpacked(data: bytes) -> tuple[Member, ...]:
    """Return the members of a sound archive; none if it is already damaged."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return tuple(Member(i.filename.encode(), archive.read(i)) for i in archive.infolist())
    except Exception:  # noqa: BLE001 - zipfile raises most of them for damage that was done before
        return ()


def packed(members: list[Member], *, count: int | None = None, end64: int = 0) -> bytes:
    """Pack an archive, with a true or a false directory.

    Args:
        count: how many members the end record tells of.
        end64: 1: sizes in a zip64 record; 2: and that record lies.
    """
    out, directory = bytearray(), bytearray()
    for member in members:
        offset = len(out)
        body = zlib.compress(member.data)[2:-4] if member.method == 8 else member.data
        crc = zlib.crc32(member.data) if member.told_crc is None else member.told_crc
        size = len(member.data) if member.told_size is None else member.told_size
        inside = len(body) if member.told_packed is None else member.told_packed
        place = offset if member.told_offset is None else member.told_offset
        later = member.flags & 8  # a data descriptor follows
        out += _LOCAL.pack(
            *(b"PK\x03\x04", 20, member.flags, member.method, 0, 0, 0 if later else crc & _ONES),
            *(0 if later else inside & _ONES, 0 if later else size & _ONES, len(member.name), 0),
        )
        out += member.name + body
        if later:
            out += struct.pack("<4s3I", b"PK\x07\x08", crc & _ONES, inside & _ONES, size & _ONES)
        name = member.name if member.told_name is None else member.told_name
        extra = b""
        if member.zip64:
            wide = (size % 2**64, inside % 2**64, place % 2**64)
            extra, size, inside, place = struct.pack("<2H3Q", 1, 24, *wide), _ONES, _ONES, _ONES
        directory += _ENTRY.pack(
            *(
                b"PK\x01\x02",
                20,
                20,
                member.flags,
                member.method,
                0,
                0,
                crc & _ONES,
                inside & _ONES,
            ),
            *(size & _ONES, len(name), len(extra), 0, 0, 0, 0, place & _ONES),
        )
        directory += name + extra
    number = (len(members) if count is None else count) % 65536
    start, size = len(out), len(directory)
    out += directory
    if end64:
        at = len(out)
        lie = 2**62 if end64 == 2 else 0
        told = (44, 45, 45, 0, 0, number, number, size + lie, start)
        out += _END64.pack(b"PK\x06\x06", *told) + struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
        start = size = _ONES
    return bytes(out + _END.pack(b"PK\x05\x06", 0, 0, number, number, size, start, 0))


_ONES = 0xFFFFFFFF


def _renamed(chance: Random, members: list[Member]) -> None:
    at = chance.randrange(len(members))
    name = chance.choice((*values.TEXTS, "archive/data.pkl", "archive/data/0", "data.pkl"))
    members[at] = replace(members[at], name=name.encode("utf-8", "surrogatepass")[:60000])


def _doubled(chance: Random, members: list[Member]) -> None:
    members.insert(chance.randrange(len(members) + 1), chance.choice(members))


def _reordered(chance: Random, members: list[Member]) -> None:
    chance.shuffle(members)


def _dropped(chance: Random, members: list[Member]) -> None:
    del members[chance.randrange(len(members))]


def _told(chance: Random, members: list[Member]) -> None:
    at = chance.randrange(len(members))
    field = chance.choice(("told_crc", "told_size", "told_packed", "told_offset"))
    members[at] = replace(members[at], **{field: abs(values.number(chance)) % 2**64})
    if chance.random() < 0.5:
        size = abs(values.number(chance)) % 2**64
        members[at] = replace(members[at], told_size=size, told_packed=size, zip64=True)


def _named_apart(chance: Random, members: list[Member]) -> None:
    """Give a member another name in the directory than in its local header."""
    at = chance.randrange(len(members))
    members[at] = replace(members[at], told_name=chance.choice(members).name)


def _compressed(chance: Random, members: list[Member]) -> None:
    at = chance.randrange(len(members))
    members[at] = replace(members[at], method=8, data=members[at].data + bytes(1 << 20))


def _described(chance: Random, members: list[Member]) -> None:
    at = chance.randrange(len(members))
    members[at] = replace(members[at], flags=chance.choice((8, 1, 0x800, 8 | 0x800)))


def _overlapping(chance: Random, members: list[Member]) -> None:
    """Let two entries of the directory name one place in the file."""
    at = chance.randrange(len(members))
    members[at] = replace(members[at], told_offset=chance.choice((0, 64, 128, 2**31)))


def _zip64(chance: Random, members: list[Member]) -> None:
    at = chance.randrange(len(members))
    members[at] = replace(members[at], zip64=True)


_LIES: tuple[Callable[[Random, list[Member]], None], ...] = (
    *(_renamed, _doubled, _reordered, _dropped, _told, _told, _named_apart, _compressed),
    *(_described, _overlapping, _zip64),
)
