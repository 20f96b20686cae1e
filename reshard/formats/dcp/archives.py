"""Open thousands of archives of one tensor each, and parse those of equal structure once.

The result of a parse depends only on the archive's structure: its local headers and pickle before
the data, and its directory behind them. Items of one shape differ there only in the CRC of the data
and in an id that no program reads. Equal bytes therefore give an equal result, except for the CRC,
which is read from each archive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from reshard.containers import torch_reader, zip_reader
from reshard.containers.torch_objects import StoredBuffer, Tensor, TorchFile
from reshard.core.manifest import Record
from reshard.system.files import Section

_CRC = 16  # byte of the CRC in a central directory entry, which is 4 bytes long
_READ_MEMBERS = ("data.pkl", "byteorder", "version")  # members whose CRCs a parse checks


@dataclass(frozen=True, slots=True)
class _ArchiveTemplate:
    """The structure of an archive, and the result of its parse."""

    head: bytes  # up to the data
    directory: int  # where the central directory begins
    tail: bytes  # from there on, with the CRCs of `free` members blank
    free: tuple[int, ...]  # their offsets in the tail
    crc: int  # offset of the data's CRC in the tail
    data: int  # where the data begin
    checked: bool
    file: TorchFile
    tensor: Tensor


class ArchiveCache:
    """Opens archives one after the other and remembers their structure."""

    def __init__(self) -> None:
        self._templates: dict[int, list[_ArchiveTemplate]] = defaultdict(list)

    def open(self, archive: Section) -> TorchFile:
        """Open an archive like `torch_reader.read_archive`, and raise the same errors."""
        # Archives of one structure have one size: few templates have to be compared.
        for template in self._templates[archive.nbytes]:
            opened = _apply_template(template, archive)
            if opened:
                return opened
        file = torch_reader.read_archive(archive)
        built = _build_template(file, archive)
        if built is not None:
            self._templates[archive.nbytes].append(built)
        return file


def _build_template(file: TorchFile, archive: Section) -> _ArchiveTemplate | None:
    """Return the structure of an archive that has one tensor in one storage, and nothing else."""
    tensor = file.root
    if not isinstance(tensor, Tensor) or len(file.records) != 1:
        return None
    (record,) = file.records.values()
    members = zip_reader.read_directory(archive).values()
    offsets = {member.name: member.entry_offset for member in members}
    directory = min(offsets.values())
    free = tuple(
        offset + _CRC - directory
        for name, offset in offsets.items()
        if name.rsplit("/", 1)[-1] not in _READ_MEMBERS
    )
    data = record.byte_offset - archive.start
    return _ArchiveTemplate(
        head=archive.read(0, data),
        directory=directory,
        tail=_blank_crcs(archive.read(directory, archive.nbytes - directory), free),
        free=free,
        crc=offsets[record.name] + _CRC - directory,
        data=data,
        checked=record.crc32 is not None,
        file=file,
        tensor=tensor,
    )


def _blank_crcs(tail: bytes, offsets: tuple[int, ...]) -> bytes:
    blanked = bytearray(tail)
    for offset in offsets:
        blanked[offset : offset + 4] = bytes(4)
    return bytes(blanked)


def _apply_template(template: _ArchiveTemplate, archive: Section) -> TorchFile | None:
    """Return the content of an archive by a template; None if its structure differs."""
    if archive.read(0, template.data) != template.head:
        return None
    tail = archive.read(template.directory, archive.nbytes - template.directory)
    if _blank_crcs(tail, template.free) != template.tail:
        return None
    old = template.tensor.storage
    start = archive.start + template.data
    storage = StoredBuffer(archive.path, old.key, old.dtype, old.nbytes, start)
    tensor = Tensor(
        storage,
        template.tensor.offset,
        template.tensor.shape,
        template.tensor.strides,
        template.tensor.dtype,
    )
    crc = (
        int.from_bytes(tail[template.crc : template.crc + 4], "little")
        if template.checked
        else None
    )
    name = template.file.records[old.key].name
    records = {old.key: Record(start, old.nbytes, crc, name)}
    return TorchFile(archive.path, archive.nbytes, tensor, template.file.globals, records)
