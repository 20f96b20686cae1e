"""The stream that ``torch.save`` wrote before torch 1.6, and writes still if asked to.

Five pickles (a magic number, the protocol, the system, the object, the keys of its storages), then
for each storage its number of elements and its data. It has no checksums.

Source: torch 2.13 ``torch/serialization.py`` (``_legacy_save``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard import stamps
from reshard.containers import numpy_arrays
from reshard.containers.torch_objects import MAX_PICKLE, TORCH_BUILDERS, Storages, TorchFile
from reshard.errors import CorruptError, UnsupportedError
from reshard.files import SourceFiles
from reshard.manifest import Record
from reshard.pickles.unpickle import Unpickled, loads
from reshard.pickles.values import Builder


def read_stream(
    path: str, size: int, files: SourceFiles, builders: Mapping[str, Builder]
) -> TorchFile:
    """Read the structure of one stream.

    Raises:
        CorruptError: truncated or altered.
        UnsupportedError: its tensors are big-endian.
    """
    storages = Storages(path)
    done, end, keys = _structure(path, size, files, builders, storages)
    root = done.value
    if numpy_arrays.are_in(done, storages.by_key.values()):
        root = numpy_arrays.settled(root, path, 0)
    value, stamp = stamps.take(root, done.stamp, path)
    file = TorchFile(path, size, value, done.globals, stamp=stamp)
    for key in keys:
        storage = storages.by_key.get(key) if isinstance(key, str) else None
        if storage is None or end + 8 + storage.nbytes > size:
            raise CorruptError(
                path,
                f"storage {str(key)[:40]} at byte {end} does not fit into the file of {size} bytes",
                "the file is truncated: fetch it again",
            )
        numel = int.from_bytes(files.read(path, end, 8), "little", signed=True)
        if numel * storage.dtype.itemsize != storage.nbytes:
            raise CorruptError(path, f"storage {key} holds {numel} elements, not as announced")
        storage.byte_offset = end + 8
        file.records[str(key)] = Record(end + 8, storage.nbytes, None, f"storage {key}")
        end += 8 + storage.nbytes
    if len(keys) != len(storages.by_key) or len(file.records) != len(keys):
        raise CorruptError(path, f"{len(storages.by_key)} storages are named, {len(keys)} stored")
    return file


def _structure(
    path: str,
    size: int,
    files: SourceFiles,
    builders: Mapping[str, Builder],
    storages: Storages,
) -> tuple[Unpickled, int, list[Any]]:
    """As `_pickles`, from as much of the file's head as the pickles turn out to need."""
    limit = min(size, MAX_PICKLE)
    nbytes = min(limit, 1 << 20)
    while True:
        head = files.read(path, 0, nbytes)
        try:
            return _pickles(path, head, builders, storages)
        except CorruptError:
            if nbytes == limit:
                raise
            storages.by_key.clear()
            nbytes = min(limit, nbytes * 8)


def _pickles(
    path: str, head: bytes, builders: Mapping[str, Builder], storages: Storages
) -> tuple[Unpickled, int, list[Any]]:
    """The object, where its storages' data begins, and the storages' keys in file order."""
    magic = loads(head, where=path)
    protocol = loads(head, where=path, start=magic.end)
    system = loads(head, where=path, start=protocol.end)
    if isinstance(system.value, dict) and system.value.get("little_endian") is False:
        raise UnsupportedError(path, "holds big-endian tensors")
    table = {**TORCH_BUILDERS, **builders}
    result = loads(head, where=path, start=system.end, builders=table, persistent=storages)
    keys = loads(head, where=path, start=result.end)
    if not isinstance(keys.value, list):
        raise CorruptError(path, "the list of storages is missing")
    return result, keys.end, keys.value
