"""Read files of ``torch.save``: the zip archive (torch >= 1.6) and the older stream.

Reads the pickle and the directory, never tensor data. The result is the saved object with every
tensor replaced by a `Tensor` with the position of its elements.

Sources: torch 2.13 ``torch/serialization.py`` (``_save``, ``_legacy_save``),
``caffe2/serialize/inline_container.cc`` (records; CRC 0 everywhere when written under
``set_crc32_options(False)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.containers import numpy_arrays
from reshard.containers.pickle_cache import PickleCache
from reshard.containers.pickles.unpickle import Unpickled, loads
from reshard.containers.pickles.values import Builder
from reshard.containers.torch_detect import LEGACY, ZIP
from reshard.containers.torch_objects import (
    MAX_PICKLE,
    TORCH_BUILDERS,
    Storages,
    StoredBuffer,
    TorchFile,
    check_views,
)
from reshard.containers.zip_reader import ZipMember, read_directory
from reshard.core import stamps
from reshard.core.manifest import Record
from reshard.errors import ALTERED, CorruptError, UnsupportedError, shown
from reshard.system.checksum import crc32
from reshard.system.files import Section, SourceFiles, refuse_lfs_pointer

_LITTLE = b"little"
_LITTLE_ENTRY = len(_LITTLE), crc32(_LITTLE)  # what the zip directory states of such a member


def read(
    path: str | Path,
    *,
    builders: Mapping[str, Builder] | None = None,
    cache: PickleCache | None = None,
) -> TorchFile:
    """Read the structure of one file.

    Args:
        builders: extra globals that become values (see `unpickle.loads`).
        cache: parsed pickles of earlier files, which may be equal to this one's.

    Raises:
        CorruptError: truncated, altered, or not a ``torch.save`` file.
        UnsupportedError: its tensors are big-endian.
    """
    path = str(path)
    with SourceFiles() as files:
        size = files.find_version(path).nbytes
        section = Section(files, path, 0, size)
        head = section.read(0, min(size, 16))
        if head.startswith(ZIP):
            return read_archive(section, builders=builders, cache=cache, is_part=False)
        if head.startswith(LEGACY):
            return _read_stream(path, size, files, builders or {})
    refuse_lfs_pointer(path, head)
    raise CorruptError(
        path,
        f"is not a torch.save file: it starts with {head[:8]!r}"
        + ("" if size else " (the file is empty)"),
        "it is truncated or another kind of file: fetch it again",
    )


def read_archive(
    archive: Section,
    *,
    builders: Mapping[str, Builder] | None = None,
    cache: PickleCache | None = None,
    is_part: bool = True,
) -> TorchFile:
    """Read the structure of one zip archive, which may lie inside a larger file.

    Storages' offsets count from the start of that file.

    Args:
        builders, cache: as in `read`.
        is_part: whether the file has further archives.

    Raises:
        CorruptError, UnsupportedError: as `read`.
    """
    path = archive.path
    members = read_directory(archive)
    pickles = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    if not pickles:
        raise CorruptError(
            path,
            "is a zip archive without data.pkl: torch.save failed while it wrote the file",
            "save it again, or choose an earlier checkpoint",
        )
    if len(pickles) > 1:
        raise CorruptError(
            path, f"is a zip archive with {len(pickles)} data.pkl files, expected one", ALTERED
        )
    member = members[pickles[0]]
    root = member.name.removesuffix("data.pkl")
    # Under ``set_crc32_options(False)`` torch writes CRC 0 for every member; no real CRC here is 0.
    checked = members.get(f"{root}version", member).crc32 != 0
    byteorder = members.get(f"{root}byteorder")
    if byteorder and (byteorder.nbytes, byteorder.crc32) != _LITTLE_ENTRY:
        _, order = byteorder.read(archive, checked=checked)
        if order != _LITTLE:
            raise UnsupportedError(
                path,
                f"contains {order.decode('latin-1')}-endian tensors",
                "load it with torch on this machine, and save it again",
            )
    if member.nbytes > MAX_PICKLE:
        raise CorruptError(
            path, f"its pickle has {member.nbytes} bytes, more than reshard reads", ALTERED
        )
    start, data = member.read(archive, checked=checked)
    start += archive.start
    parsed = (cache or PickleCache()).parse(data, path, builders or {}, start)
    file = TorchFile(
        path,
        archive.nbytes,
        parsed.value,
        parsed.globals,
        archive=root.rstrip("/"),
        stamp=parsed.stamp,
        is_known=parsed.is_known,
        version=archive.version,
    )
    check_views(path, parsed.storages, archive.nbytes, is_part=is_part)
    stored = [members.get(f"{root}data/{storage.key}") for storage in parsed.storages]
    # Each storage's local header is read by itself: in an object store, that is a request each.
    archive.prefetch(member.header for member in stored if member)
    for storage, place in zip(parsed.storages, stored, strict=True):
        _place_storage(file, storage, place, archive, checked=checked)
    return file


def _place_storage(
    file: TorchFile,
    storage: StoredBuffer,
    member: ZipMember | None,
    archive: Section,
    *,
    checked: bool,
) -> None:
    key = storage.key
    if member is None or member.nbytes != storage.nbytes:
        raise CorruptError(
            file.path,
            f"storage {key} is {storage.nbytes} bytes in the pickle, "
            + (f"{member.nbytes} in the archive" if member else "absent from the archive"),
            "the file is damaged or was repacked: fetch it again",
        )
    storage.byte_offset = archive.start + member.data_offset(archive)
    crc = member.crc32 if checked else None
    file.records[key] = Record(storage.byte_offset, storage.nbytes, crc, member.name)


def _read_stream(
    path: str, size: int, files: SourceFiles, builders: Mapping[str, Builder]
) -> TorchFile:
    # Five pickles (a magic number, the protocol, the system, the object, the keys of its storages)
    # come first, then for each storage its number of elements and its data, which are little-endian
    # on every system (``THPStorage_writeFileRaw``). There are no checksums.
    storages = Storages(path)
    done, end, keys = _read_structure(path, size, files, builders, storages)
    check_views(path, storages.by_key.values(), size)
    root = done.value
    if numpy_arrays.has_arrays(done, storages.by_key.values()):
        root = numpy_arrays.convert(root, path, 0)
    value, stamp = stamps.take(root, done.stamp, path)
    version = files.find_version(path)
    file = TorchFile(path, size, value, done.globals, stamp=stamp, version=version)
    for key in keys:
        storage = storages.by_key.get(key) if isinstance(key, str) else None
        if storage is None:
            raise CorruptError(
                path, f"lists storage {shown(key)}, which its pickle does not contain", ALTERED
            )
        stop = end + 8 + storage.nbytes  # 8 bytes for the number of elements
        if stop > size:
            raise CorruptError(
                path,
                f"storage {key[:40]} ends at byte {stop}, but the file has {size}",
                "the file is truncated: fetch it again",
            )
        numel = int.from_bytes(files.read(path, end, 8), "little", signed=True)
        if numel * storage.dtype.itemsize != storage.nbytes:
            raise CorruptError(
                path,
                f"storage {key} has {numel} elements, but its pickle states another number",
                ALTERED,
            )
        storage.byte_offset = end + 8
        file.records[key] = Record(end + 8, storage.nbytes, None, f"storage {key}")
        end = stop
    if len(keys) != len(storages.by_key) or len(file.records) != len(keys):
        raise CorruptError(
            path,
            f"the pickle names {len(storages.by_key)} storages, but the file stores {len(keys)}",
            ALTERED,
        )
    # As in an archive, in the order of the pickle: the stream has that of addresses in memory.
    file.records = {key: file.records[key] for key in storages.by_key}
    return file


def _read_structure(
    path: str,
    size: int,
    files: SourceFiles,
    builders: Mapping[str, Builder],
    storages: Storages,
) -> tuple[Unpickled, int, list[Any]]:
    # No field gives the length of the pickles, and data of any size follow them.
    limit = min(size, MAX_PICKLE)
    nbytes = min(limit, 1 << 20)
    while True:
        head = files.read(path, 0, nbytes)
        try:
            return _read_pickles(path, head, builders, storages)
        except CorruptError:  # a pickle that the head cuts off looks damaged
            if nbytes == limit:
                raise
            # The attempt on a shorter head may have registered storages.
            storages.by_key.clear()
            nbytes = min(limit, nbytes * 8)


def _read_pickles(
    path: str, head: bytes, builders: Mapping[str, Builder], storages: Storages
) -> tuple[Unpickled, int, list[Any]]:
    magic = loads(head, where=path)
    protocol = loads(head, where=path, start=magic.end)
    system = loads(head, where=path, start=protocol.end)
    table = {**TORCH_BUILDERS, **builders}
    result = loads(head, where=path, start=system.end, builders=table, persistent=storages)
    keys = loads(head, where=path, start=result.end)
    if not isinstance(keys.value, list):
        raise CorruptError(path, "its list of storages is missing", ALTERED)
    return result, keys.end, keys.value
