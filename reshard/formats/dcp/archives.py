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
from reshard.files import Section
from reshard.manifest import Record

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
        self._forms: dict[int, list[_ArchiveTemplate]] = defaultdict(list)

    def open(self, archive: Section) -> TorchFile:
        """Open an archive like `torch_reader.read_archive`, and raise the same errors."""
        # Archives of one structure have one size: few templates have to be compared.
        for form in self._forms[archive.nbytes]:
            opened = _apply_template(form, archive)
            if opened:
                return opened
        file = torch_reader.read_archive(archive)
        template = _build_template(file, archive)
        if template is not None:
            self._forms[archive.nbytes].append(template)
        return file


def _build_template(file: TorchFile, archive: Section) -> _ArchiveTemplate | None:
    """Return the structure of an archive that has one tensor in one storage, and nothing else."""
    tensor = file.root
    if not isinstance(tensor, Tensor) or len(file.records) != 1:
        return None
    (record,) = file.records.values()
    offsets = dict(zip_reader.list_central_offsets(archive))
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


def _apply_template(form: _ArchiveTemplate, archive: Section) -> TorchFile | None:
    """Return the content of an archive by a template; None if its structure differs."""
    if archive.read(0, form.data) != form.head:
        return None
    tail = archive.read(form.directory, archive.nbytes - form.directory)
    if _blank_crcs(tail, form.free) != form.tail:
        return None
    old = form.tensor.storage
    start = archive.start + form.data
    storage = StoredBuffer(archive.path, old.key, old.dtype, old.nbytes, start)
    tensor = Tensor(
        storage, form.tensor.offset, form.tensor.shape, form.tensor.strides, form.tensor.dtype
    )
    crc = int.from_bytes(tail[form.crc : form.crc + 4], "little") if form.checked else None
    name = form.file.records[old.key].name
    records = {old.key: Record(start, old.nbytes, crc, name)}
    return TorchFile(archive.path, archive.nbytes, tensor, form.file.globals, records)
