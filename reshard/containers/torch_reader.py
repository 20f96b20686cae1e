"""Read files of ``torch.save``: the zip archive (torch >= 1.6) and the older stream.

Reads the pickle and the directory, never tensor data. The result is the saved object with every
tensor replaced by a `Tensor` with the position of its elements.

Sources: torch 2.13 ``torch/serialization.py`` (``_save``, ``_legacy_save``),
``caffe2/serialize/inline_container.cc`` (records; CRC 0 everywhere when written under
``set_crc32_options(False)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.containers import numpy_arrays
from reshard.containers.pickles.unpickle import Unpickled, loads
from reshard.containers.pickles.values import Builder
from reshard.containers.torch_detect import LEGACY, ZIP
from reshard.containers.torch_objects import (
    MAX_PICKLE,
    TORCH_BUILDERS,
    Storages,
    StoredBuffer,
    Tensor,
    TorchFile,
)
from reshard.containers.zip_reader import ZipMember, read_directory
from reshard.core import stamps
from reshard.core.manifest import Record
from reshard.errors import ALTERED, CorruptError, UnsupportedError, shown
from reshard.system.files import Section, SourceFiles, get_size, refuse_lfs_pointer

_DEEPEST = 16  # of containers in a pickle that `PickleCache` keeps


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
    size = get_size(path)
    with SourceFiles() as files:
        head = files.read(path, 0, min(size, 16))
        if head.startswith(ZIP):
            archive = Section(files, path, 0, size)
            return read_archive(archive, builders=builders, cache=cache)
        if head.startswith(LEGACY):
            return _read_stream(path, size, files, builders or {})
    refuse_lfs_pointer(path, head)
    raise CorruptError(
        path,
        f"is not a torch.save file: it starts with {head[:8]!r}"
        + ("" if size else " (the file is empty)"),
        "it is truncated or another kind of file: fetch it again",
    )


class PickleCache:
    """Parses a pickle that many files have in common (ranks, parameters of one shape) once.

    The positions of elements differ between files. So a pickle whose tensors have elements is kept
    only if all of its tensors are in dicts, lists and tuples, in which they are easily replaced.
    """

    _MOST = 16  # pickles: enough for the devices of a node, or the shapes of a model

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[Unpickled, tuple[StoredBuffer, ...], set[int]]] = {}

    def parse(
        self, data: bytes, path: str, builders: Mapping[str, Builder], start: int
    ) -> tuple[Unpickled, tuple[StoredBuffer, ...]]:
        """Return the content of a pickle, not to be changed, and its storages without positions.

        Args:
            start: byte of the file at which the pickle begins.
        """
        if data in self._seen:
            done, shared, holders = self._seen[data]
            own = {
                id(each): StoredBuffer(path, each.key, each.dtype, each.nbytes, views=each.views)
                for each in shared
            }
            value = _replace_storages(done.value, own, holders, {})
            return replace(done, value=value), tuple(own.values())
        storages = Storages(path)
        done = loads(data, where=path, builders={**TORCH_BUILDERS, **builders}, persistent=storages)
        parsed = tuple(storages.by_key.values())
        # The elements of arrays are in the pickle, at positions in this file, so it is not kept.
        if numpy_arrays.has_arrays(done, parsed):
            return replace(done, value=numpy_arrays.convert(done.value, path, start)), parsed
        if len(self._seen) < self._MOST:
            holders = set()
            # A pickle of placeholders can have many of them.
            is_bare = not any(each.nbytes for each in parsed) and not _is_simple(done.value)
            tensors = frozenset() if is_bare else _find_tensors(done.value, holders, {})
            if is_bare or len(tensors) == sum(each.views for each in parsed):
                self._seen[data] = done, parsed, holders
        return done, parsed


def _is_simple(value: Any) -> bool:
    """Return whether a value is a tensor, or a dict of tensors and plain values."""
    values = value.values() if isinstance(value, dict) else (value,)
    return all(isinstance(each, (Tensor, str, int, float, type(None))) for each in values)


def _find_tensors(
    value: Any, holders: set[int], seen: dict[int, frozenset[int]], depth: int = 0
) -> frozenset[int]:
    """Return the ids of the tensors that are in a value, or in dicts, lists and tuples in it.

    Args:
        value: the value.
        holders: receives the ids of the tensors and of all values that hold them.
        seen: what was found in the values before.
        depth: how many values hold this one.
    """
    if id(value) in seen:
        return seen[id(value)]
    found: frozenset[int] = frozenset()
    if type(value) is Tensor:
        found = frozenset((id(value),))
    elif type(value) in (dict, list, tuple) and depth < _DEEPEST:
        # A value that holds itself gives an id too many, so the pickle is not kept.
        seen[id(value)] = frozenset((id(value),))
        each = value.values() if type(value) is dict else value
        found = found.union(*(_find_tensors(item, holders, seen, depth + 1) for item in each))
    seen[id(value)] = found
    if found:
        holders.add(id(value))
    return found


def _replace_storages(
    value: Any, own: Mapping[int, StoredBuffer], holders: set[int], made: dict[int, Any]
) -> Any:
    """Return a copy of a value whose tensors use other storages; what holds none is not copied.

    Args:
        value: the value.
        own: the id of each storage -> the other storage.
        holders: what `_find_tensors` found.
        made: the copies before: a value that is in two places has one copy.
    """
    key = id(value)
    if key not in holders:
        return value
    if key in made:
        return made[key]
    copy: Any
    if isinstance(value, dict):
        made[key] = copy = {}
        copy.update((k, _replace_storages(each, own, holders, made)) for k, each in value.items())
    elif isinstance(value, list):
        made[key] = copy = []
        copy.extend(_replace_storages(each, own, holders, made) for each in value)
    elif isinstance(value, tuple):
        copy = made[key] = tuple(_replace_storages(each, own, holders, made) for each in value)
    else:
        copy = made[key] = replace(value, storage=own[id(value.storage)])
    return copy


def read_archive(
    archive: Section,
    *,
    builders: Mapping[str, Builder] | None = None,
    cache: PickleCache | None = None,
) -> TorchFile:
    """Read the structure of one zip archive, which may lie inside a larger file.

    Storages' offsets count from the start of that file.

    Raises:
        CorruptError, UnsupportedError: as `read`.
    """
    path = archive.path
    members = read_directory(archive)
    pickles = [name for name in members if name.rsplit("/", 1)[-1] == "data.pkl"]
    if len(pickles) != 1:
        raise CorruptError(
            path, f"is a zip archive with {len(pickles)} data.pkl files, expected one"
        )
    member = members[pickles[0]]
    root = member.name.removesuffix("data.pkl")
    # Under ``set_crc32_options(False)`` torch writes CRC 0 for every member; no real CRC here is 0.
    checked = members.get(f"{root}version", member).crc32 != 0
    if members.get(f"{root}byteorder"):
        order = members[f"{root}byteorder"].read(archive, checked=checked)
        if order != b"little":
            raise UnsupportedError(path, f"contains {order!r}-endian tensors")
    if member.nbytes > MAX_PICKLE:
        raise CorruptError(path, f"its pickle has {member.nbytes} bytes, more than reshard reads")
    data = member.read(archive, checked=checked)
    start = archive.start + member.data_offset(archive)
    done, storages = (cache or PickleCache()).parse(data, path, builders or {}, start)
    value, stamp = stamps.take(done.value, done.stamp, path)
    file = TorchFile(
        path, archive.nbytes, value, done.globals, archive=root.rstrip("/"), stamp=stamp
    )
    stored = (members.get(f"{root}data/{storage.key}") for storage in storages)
    # Each storage's local header is read by itself: in an object store, that is a request each.
    archive.prefetch(member.header for member in stored if member)
    for storage in storages:
        _place_storage(
            file, storage, members.get(f"{root}data/{storage.key}"), archive, checked=checked
        )
    return file


def _place_storage(
    file: TorchFile,
    storage: StoredBuffer,
    member: ZipMember | None,
    archive: Section,
    *,
    checked: bool,
) -> None:
    """Set a storage's position, and record its CRC."""
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
    """Read the structure of one stream, as torch before 1.6 wrote it.

    Five pickles (a magic number, the protocol, the system, the object, the keys of its storages)
    come first, then for each storage its number of elements and its data. There are no checksums.

    Raises:
        CorruptError: truncated or altered.
        UnsupportedError: its tensors are big-endian.
    """
    storages = Storages(path)
    done, end, keys = _read_structure(path, size, files, builders, storages)
    root = done.value
    if numpy_arrays.has_arrays(done, storages.by_key.values()):
        root = numpy_arrays.convert(root, path, 0)
    value, stamp = stamps.take(root, done.stamp, path)
    file = TorchFile(path, size, value, done.globals, stamp=stamp)
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
                path, f"storage {key} has {numel} elements, but its pickle states another number"
            )
        storage.byte_offset = end + 8
        file.records[key] = Record(end + 8, storage.nbytes, None, f"storage {key}")
        end = stop
    if len(keys) != len(storages.by_key) or len(file.records) != len(keys):
        raise CorruptError(
            path,
            f"the pickle names {len(storages.by_key)} storages, but the file stores {len(keys)}",
        )
    return file


def _read_structure(
    path: str,
    size: int,
    files: SourceFiles,
    builders: Mapping[str, Builder],
    storages: Storages,
) -> tuple[Unpickled, int, list[Any]]:
    """Read the pickles from as much of the file's head as they turn out to need."""
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
    """Return the object, the byte at which data begin, and the storages' keys in file order."""
    magic = loads(head, where=path)
    protocol = loads(head, where=path, start=magic.end)
    system = loads(head, where=path, start=protocol.end)
    if isinstance(system.value, dict) and system.value.get("little_endian") is False:
        raise UnsupportedError(path, "contains big-endian tensors")
    table = {**TORCH_BUILDERS, **builders}
    result = loads(head, where=path, start=system.end, builders=table, persistent=storages)
    keys = loads(head, where=path, start=result.end)
    if not isinstance(keys.value, list):
        raise CorruptError(path, "its list of storages is missing")
    return result, keys.end, keys.value
