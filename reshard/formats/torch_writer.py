"""Lay out a ``torch.save`` zip of a state dict before its tensors are read.

torch writes the pickle and an archive of the right size from fake tensors; everything outside
the storages is literal. The CRCs, which torch leaves 0 when it skips the data, are filled in:
those of literal members here, those of storages by the executor.

Source: torch 2.13 ``torch/serialization.py`` (``skip_data(materialize_fake_tensors=True)``),
``caffe2/serialize/inline_container.cc``; data descriptors: PKWARE APPNOTE.TXT 4.3.9.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from reshard.checksum import crc32
from reshard.dtypes import DType
from reshard.files import SourceFiles
from reshard.formats import torch_file, zip_directory
from reshard.manifest import Entry, OutputFile, Skeleton, StoredChecksum

_ARCHIVE = "archive"  # the member prefix; torch takes the file's stem, which must not leak a path
_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL_CRC = 16  # byte of the CRC in a central directory entry


def lay_out(name: str, tensors: Sequence[tuple[Entry, DType]]) -> Skeleton:
    """The file ``name`` with one storage a tensor, contiguous, in the given order."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as scratch:
        path = Path(scratch) / f"{_ARCHIVE}.pt"
        _save_without_data(path, tensors)
        file = torch_file.read(path)
        size = path.stat().st_size
        literals, checksums = _literals(str(path), size, file, name)
    entries = tuple(
        _placed(name, entry, dtype, file.root[entry.fqn], file) for entry, dtype in tensors
    )
    return Skeleton((OutputFile(name, size, tuple(literals)),), entries, tuple(checksums))


def _save_without_data(path: Path, tensors: Sequence[tuple[Entry, DType]]) -> None:
    """A sparse file: only the pickle and the directory take space."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = {
            entry.fqn: torch.empty(entry.shape, dtype=getattr(torch, dtype.name))
            for entry, dtype in tensors
        }
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, path)


def _placed(
    name: str, entry: Entry, dtype: DType, made: torch_file.Tensor, file: torch_file.TorchFile
) -> Entry:
    chunk = file.chunk(made)
    moved = type(chunk)(chunk.box, name, chunk.byte_offset, chunk.byte_strides, dtype)
    return Entry(entry.fqn, entry.kind, dtype, entry.shape, (moved,))


def _literals(
    path: str, size: int, file: torch_file.TorchFile, name: str
) -> tuple[list[tuple[int, bytes]], list[StoredChecksum]]:
    """Every byte outside the storages, with the CRCs of the literal members written in."""
    with SourceFiles() as files:
        members = zip_directory.read_directory(path, size, files)
        data = {m.name: (m.data_offset(path, files), m.nbytes) for m in members.values()}
        storages = {record.name: record for record in file.records.values()}
        places = _crc_places(path, size, data, files)
        holes = sorted((r.byte_offset, r.byte_offset + r.nbytes) for r in storages.values())
        literals = []
        at = 0
        for start, stop in [*holes, (size, size)]:
            if start > at:
                literals.append((at, files.read(path, at, start - at)))
            at = max(at, stop)
        for member, (offset, nbytes) in data.items():
            if member not in storages:
                crc = crc32(files.read(path, offset, nbytes)).to_bytes(4, "little")
                literals += [(place, crc) for place in places[member]]
    checksums = [
        StoredChecksum(name, record.byte_offset, record.nbytes, places[record.name])
        for record in storages.values()
    ]
    return literals, checksums


def _crc_places(
    path: str, size: int, data: dict[str, tuple[int, int]], files: SourceFiles
) -> dict[str, tuple[int, ...]]:
    """Bytes at which each member's CRC stands: its central entry, and its data descriptor."""
    found: dict[str, tuple[int, ...]] = {}
    for member, central in zip_directory.central_offsets(path, size, files):
        offset, nbytes = data[member]
        places = [central + _CENTRAL_CRC]
        after = files.read(path, offset + nbytes, min(4, size - offset - nbytes))
        if after == _DESCRIPTOR:
            places.append(offset + nbytes + 4)
        found[member] = tuple(places)
    return found
