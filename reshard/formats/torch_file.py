"""Files that ``torch.save`` wrote: the zip archive (torch >= 1.6) and the stream before it.

Reads the pickle and the directory, never tensor data. The result is the saved object with every
tensor replaced by a `Tensor` that says where its elements lie.

Sources: torch 2.13 ``torch/serialization.py`` (``_save``, ``_legacy_save``), ``torch/_utils.py``
(rebuild functions), ``caffe2/serialize/inline_container.cc`` (records; CRC 0 everywhere when
written under ``set_crc32_options(False)``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from reshard import dtypes
from reshard.box import Index, whole
from reshard.dtypes import DType
from reshard.errors import CorruptError, UnsupportedError
from reshard.files import Section, SourceFiles, size_of
from reshard.formats.torch_saves import LEGACY, ZIP
from reshard.formats.zip_directory import Member, read_directory
from reshard.manifest import Chunk, Record, SourceFile
from reshard.pickles.unpickle import Unpickled, loads
from reshard.pickles.values import Builder, Call, Global

_MAX_PICKLE = 1 << 30  # bytes; a pickle larger than this holds data, not structure
_MAX_NUMEL = 1 << 63
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"


@dataclass(slots=True, eq=False)
class Storage:
    """One stored buffer; ``byte_offset`` is -1 until its place in the file is known."""

    file: str
    key: str
    dtype: DType
    nbytes: int
    byte_offset: int = -1


@dataclass(slots=True, eq=False)
class Tensor:
    """A strided view of a storage; shape, strides and offset in elements."""

    storage: Storage
    offset: int
    shape: Index
    strides: Index
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def place(self) -> tuple[str, str, int, Index, Index]:
        """Equal for two tensors exactly when they are the same view."""
        return self.storage.file, self.storage.key, self.offset, self.shape, self.strides

    @property
    def chunk(self) -> Chunk:
        """The whole tensor as one chunk of itself."""
        size = self.dtype.itemsize
        offset = self.offset if self.numel else 0  # an empty view may begin anywhere
        start = self.storage.byte_offset + offset * size
        strides = tuple(stride * size for stride in self.strides)
        return Chunk(whole(self.shape), self.storage.file, start, strides, self.dtype)


@dataclass(slots=True)
class TorchFile:
    """One opened file: the saved object, its storages, and the globals that its pickle names."""

    path: str
    nbytes: int
    root: Any
    globals: set[str]
    records: dict[str, Record] = field(default_factory=dict)  # storage key -> record

    def chunk(self, tensor: Tensor) -> Chunk:
        """The whole tensor as one chunk of itself."""
        return tensor.chunk

    def source(self) -> SourceFile:
        """The file as a manifest lists it."""
        ordered = sorted(self.records.values(), key=lambda record: record.byte_offset)
        return SourceFile(self.path, self.nbytes, tuple(ordered))

    def number(self, tensor: Tensor) -> float | int:
        """The value of a one-element tensor, as a step counter is."""
        with SourceFiles() as files:
            return number_at(files, self.chunk(tensor))


_NUMBERS = {
    "float32": "<f",
    "float64": "<d",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "uint8": "<B",
    "bool": "<?",
}


def number_at(files: SourceFiles, chunk: Chunk) -> float | int:
    """The value of a one-element chunk.

    Raises:
        UnsupportedError: it has more elements, or a dtype that no counter has.
    """
    if chunk.box.volume != 1 or chunk.dtype.name not in _NUMBERS:
        raise UnsupportedError(chunk.file, f"a counter of dtype {chunk.dtype} {chunk.box.shape}")
    raw = files.read(chunk.file, chunk.byte_offset, chunk.dtype.itemsize)
    value: float | int = struct.unpack(_NUMBERS[chunk.dtype.name], raw)[0]
    return value


def read(
    path: str | Path,
    *,
    builders: Mapping[str, Builder] | None = None,
    alike: Alike | None = None,
) -> TorchFile:
    """Read the structure of one file.

    Args:
        builders: extra globals that become values (see `unpickle.loads`).
        alike: what the files before it held, of which many may hold the same.

    Raises:
        CorruptError: truncated, altered, or not a ``torch.save`` file.
        UnsupportedError: its tensors are big-endian.
    """
    path = str(path)
    size = size_of(path)
    with SourceFiles() as files:
        head = files.read(path, 0, min(size, 16))
        if head.startswith(ZIP):
            archive = Section(files, path, 0, size)
            return read_archive(archive, builders=builders, alike=alike)
        if head.startswith(LEGACY):
            return _read_legacy(path, size, files, builders or {})
    raise CorruptError(
        path,
        f"is not a file of torch.save: it starts with {head[:8]!r}"
        + ("" if size else " (the file is empty)"),
        "it is truncated, or of another kind: fetch it again",
    )


class _Storages:
    """Makes storages from persistent ids; one object a key, so that views share it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.by_key: dict[str, Storage] = {}

    def __call__(self, pid: Any) -> Storage:
        tag, kind, key, _location, numel, *view = pid
        if tag != "storage" or not isinstance(kind, Global) or (view and view[0] is not None):
            raise ValueError("a persistent id that is not a storage")
        if not isinstance(key, (str, int)) or not _is_size(numel):
            raise ValueError("a storage without a key or of impossible size")
        name = kind.name.rsplit(".", 1)[-1]
        dtype = dtypes.UINT8 if name == "UntypedStorage" else dtypes.BY_STORAGE.get(name)
        if dtype is None:
            raise UnsupportedError(self.path, f"holds a {kind.name}, which has no plain dtype")
        key = str(key)
        made = Storage(self.path, key, dtype, numel * dtype.itemsize)
        return self.by_key.setdefault(key, made)


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < _MAX_NUMEL


def _strided(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None = None
) -> Tensor:
    """A tensor whose every element provably lies inside its storage."""
    if not isinstance(storage, Storage):
        raise TypeError("a tensor of what is no storage")
    shape, strides = tuple(shape), tuple(strides)
    if len(shape) != len(strides) or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor of impossible shape, strides or offset")
    tensor = Tensor(storage, offset, shape, strides, dtype or storage.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if tensor.numel and (last + 1) * tensor.dtype.itemsize > storage.nbytes:
        raise ValueError(f"a tensor that reaches past its storage of {storage.nbytes} bytes")
    return tensor


def _rebuild_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any = None,
    _hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    _refuse_lazy(storage, metadata)
    return _strided(storage, offset, shape, strides)


def _rebuild_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any,
    _hooks: Any,
    dtype: Global,
    metadata: Any = None,
) -> Tensor:
    _refuse_lazy(storage, metadata)
    return _strided(storage, offset, shape, strides, _named_dtype(dtype))


def _refuse_lazy(storage: Any, metadata: Any) -> None:
    """A lazily conjugated or negated tensor is stored as the bits before, and a flag."""
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        raise UnsupportedError(
            getattr(storage, "file", "a tensor"),
            "holds a tensor that is conjugated or negated lazily",
            "save it with resolve_conj().resolve_neg()",
        )


def _named_dtype(dtype: Global) -> DType:
    return dtypes.BY_NAME[dtype.name.removeprefix("torch.")]


def _first(value: Any, *_rest: Any) -> Any:
    return value


def _rebuild_typed(function: Global, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor, or a `Call` of its class where that is a wrapper (ShardedTensor, DTensor)."""
    if function.name.startswith("torch._tensor."):
        raise ValueError("a rebuild of a rebuild")
    builder = TORCH_BUILDERS.get(function.name)
    if builder:
        return builder(*args)
    wrapper = function.name == _WRAPPER and isinstance(kind, Global)
    return Call(kind.name if wrapper else function.name, args, state)


TORCH_BUILDERS: dict[str, Builder] = {
    "torch._tensor._rebuild_from_type_v2": _rebuild_typed,
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.Size": lambda dims=(): tuple(dims),
}


class Alike:
    """Pickles that many files hold, of ranks or of parameters of one shape: each is parsed once.

    Of those with tensors that have elements, whose places are each file's own, only the simplest
    are kept: a tensor, or a dict of tensors and plain values.
    """

    _MOST = 16  # devices of a node, shapes of a model

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[Unpickled, tuple[Storage, ...]]] = {}

    def parsed(
        self, data: bytes, path: str, builders: Mapping[str, Builder]
    ) -> tuple[Unpickled, tuple[Storage, ...]]:
        """What a pickle holds, not to be changed; and its storages, without their places."""
        if data in self._seen:
            done, held = self._seen[data]
            own = {id(each): Storage(path, each.key, each.dtype, each.nbytes) for each in held}
            return replace(done, value=_with_storages(done.value, own)), tuple(own.values())
        storages = _Storages(path)
        done = loads(data, where=path, builders={**TORCH_BUILDERS, **builders}, persistent=storages)
        found = tuple(storages.by_key.values())
        bare = not any(storage.nbytes for storage in found)
        if len(self._seen) < self._MOST and (bare or _is_simple(done.value)):
            self._seen[data] = done, found
        return done, found


def _is_simple(value: Any) -> bool:
    """Whether it is a tensor, or a dict of tensors and plain values."""
    values = value.values() if isinstance(value, dict) else (value,)
    return all(isinstance(each, (Tensor, str, int, float, type(None))) for each in values)


def _with_storages(value: Any, own: Mapping[int, Storage]) -> Any:
    """A simple value with tensors on other storages, by the identity of theirs; else the same."""
    if not _is_simple(value):
        return value
    if isinstance(value, dict):
        return {key: _with_storages(each, own) for key, each in value.items()}
    if isinstance(value, Tensor):
        return replace(value, storage=own[id(value.storage)])
    return value


def read_archive(
    archive: Section,
    *,
    builders: Mapping[str, Builder] | None = None,
    alike: Alike | None = None,
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
        raise CorruptError(path, f"a zip archive with {len(pickles)} data.pkl, expected one")
    root = pickles[0].removesuffix("data.pkl")
    checked = members.get(f"{root}version", members[pickles[0]]).crc32 != 0
    if members.get(f"{root}byteorder"):
        order = members[f"{root}byteorder"].read(archive, checked=checked)
        if order != b"little":
            raise UnsupportedError(path, f"holds {order!r}-endian tensors")
    if members[pickles[0]].nbytes > _MAX_PICKLE:
        raise CorruptError(path, f"its pickle claims {members[pickles[0]].nbytes} bytes")
    data = members[pickles[0]].read(archive, checked=checked)
    done, storages = (alike or Alike()).parsed(data, path, builders or {})
    file = TorchFile(path, archive.nbytes, done.value, done.globals)
    held = (members.get(f"{root}data/{storage.key}") for storage in storages)
    archive.expect(member.header for member in held if member)
    for storage in storages:
        _place(file, storage, members.get(f"{root}data/{storage.key}"), archive, checked=checked)
    return file


def _place(
    file: TorchFile, storage: Storage, member: Member | None, archive: Section, *, checked: bool
) -> None:
    """Where a storage lies, and with which CRC."""
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


def _read_legacy(
    path: str, size: int, files: SourceFiles, builders: Mapping[str, Builder]
) -> TorchFile:
    """The stream of torch < 1.6: five pickles, then (int64 numel, data) a storage. No CRCs."""
    storages = _Storages(path)
    done, end, keys = _legacy_structure(path, size, files, builders, storages)
    file = TorchFile(path, size, done.value, done.globals)
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


def _legacy_structure(
    path: str,
    size: int,
    files: SourceFiles,
    builders: Mapping[str, Builder],
    storages: _Storages,
) -> tuple[Unpickled, int, list[Any]]:
    """As `_legacy_pickles`, from as much of the file's head as the pickles turn out to need."""
    limit = min(size, _MAX_PICKLE)
    nbytes = min(limit, 1 << 20)
    while True:
        head = files.read(path, 0, nbytes)
        try:
            return _legacy_pickles(path, head, builders, storages)
        except CorruptError:
            if nbytes == limit:
                raise
            storages.by_key.clear()
            nbytes = min(limit, nbytes * 8)


def _legacy_pickles(
    path: str, head: bytes, builders: Mapping[str, Builder], storages: _Storages
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
