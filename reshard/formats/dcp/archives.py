"""Remember the structure of archives of one tensor each, of which a checkpoint has thousands.

The content of an archive depends only on its structure: its local headers and pickle before the
data, and its directory behind them. Items of one shape differ there only in the CRC of the data and
in an id that no program reads. An archive with the same bytes elsewhere has the same content, so it
needs no parse.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace

from reshard.containers import zip_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core.chunks import Chunk
from reshard.core.manifest import Record
from reshard.system.files import Section

_CRC = 16  # byte of the CRC in a central directory entry, which is 4 bytes long
_READ_MEMBERS = ("data.pkl", "byteorder", "version")  # members whose CRCs a parse checks


@dataclass(frozen=True, slots=True)
class _ArchiveTemplate:
    """The structure of an archive, and the result of its parse.

    Args:
        head: the bytes before the data.
        directory: offset of the central directory.
        tail: a pattern of the bytes from there on, whose group is the CRC of the data.
        chunk: the tensor as one chunk of itself, at an offset from the start of the archive.
        record: the record of the data, also at an offset from there.
    """

    head: bytes
    directory: int
    tail: re.Pattern[bytes]
    chunk: Chunk
    record: Record


class ArchiveCache:
    """The structures of archives that were parsed."""

    def __init__(self) -> None:
        self._templates: dict[int, list[_ArchiveTemplate]] = defaultdict(list)

    def find(self, archive: Section) -> tuple[Chunk, Record] | None:
        """Return the tensor of an archive as one chunk of itself, and the record of its data.

        Returns:
            None if no archive of the same structure was added.
        """
        # Archives of one structure have one size: few templates have to be compared.
        for template in self._templates[archive.nbytes]:
            found = _apply_template(template, archive)
            if found:
                return found
        return None

    def add(self, file: TorchFile, archive: Section) -> None:
        """Remember an archive if it has one tensor in one storage, and nothing else."""
        tensor = file.root
        if not isinstance(tensor, Tensor) or len(file.records) != 1:
            return
        (record,) = file.records.values()
        members = zip_reader.read_directory(archive).values()
        offsets = {member.name: member.entry_offset for member in members}
        directory, chunk = min(offsets.values()), tensor.chunk
        free = {
            offset + _CRC - directory: name
            for name, offset in offsets.items()
            if name.rsplit("/", 1)[-1] not in _READ_MEMBERS
        }
        tail = archive.read(directory, archive.nbytes - directory)
        template = _ArchiveTemplate(
            head=archive.read(0, record.byte_offset - archive.start),
            directory=directory,
            tail=_build_pattern(tail, free, record.name),
            chunk=replace(chunk, byte_offset=chunk.byte_offset - archive.start),
            record=replace(record, byte_offset=record.byte_offset - archive.start),
        )
        self._templates[archive.nbytes].append(template)


def _build_pattern(tail: bytes, free: dict[int, str], captured: str) -> re.Pattern[bytes]:
    pattern, at = b"", 0
    for offset in sorted(free):
        crc = rb"(.{4})" if free[offset] == captured else rb".{4}"
        pattern += re.escape(tail[at:offset]) + crc
        at = offset + 4
    return re.compile(pattern + re.escape(tail[at:]), re.DOTALL)


def _apply_template(template: _ArchiveTemplate, archive: Section) -> tuple[Chunk, Record] | None:
    if archive.read(0, len(template.head)) != template.head:
        return None
    start, chunk, record = archive.start, template.chunk, template.record
    match = template.tail.fullmatch(
        archive.read(template.directory, archive.nbytes - template.directory)
    )
    if match is None:
        return None
    crc = None if record.crc32 is None else int.from_bytes(match[1], "little")
    return (
        Chunk(chunk.box, archive.path, start + chunk.byte_offset, chunk.byte_strides, chunk.dtype),
        Record(start + record.byte_offset, record.nbytes, crc, record.name),
    )
