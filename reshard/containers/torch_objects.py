"""Describe tensors and storages in the pickles of ``torch.save``, and locate their elements.

Source: torch 2.13 ``torch/_utils.py`` (rebuild functions), ``torch/serialization.py``
(``persistent_id``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from reshard.containers.pickles.values import Builder, Call, Global
from reshard.core import dtypes, stamps
from reshard.core.box import MAX_DIMS, Index, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.core.manifest import Claim, Record, SourceFile
from reshard.core.stamps import Stamp
from reshard.errors import ALTERED, CorruptError, UnsupportedError
from reshard.system.files import SourceFiles
from reshard.system.versions import FileVersion

MAX_PICKLE = 1 << 30  # bytes; a pickle larger than this holds data, not structure
_MAX_NUMEL = 1 << 63
# Limits for the bytes of all tensors in a file: a multiple of its size, but not less than a number
# of bytes. (A model can apply one block dozens of times, under as many names.)
_MOST_REPEATED, _LEAST, _LEAST_PART = 64, 64 << 20, 1 << 20
_TORCH_DTYPE = re.compile(r"torch\.(float|complex|q?u?int|bits)\d\w*")
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_FLOAT8, _TRAINING = "torchao.float8.fsdp_utils", "torchao.prototype.quantized_training"
_GROUPED = "torchao.prototype.moe_training.tensor"
_COLLECTIVES = "torch.distributed._functional_collectives"
_HELD = {
    f"{_COLLECTIVES}.AsyncCollectiveTensor": "elem",  # what a collective returns before it is read
    f"{_FLOAT8}.WeightWithDynamicFloat8CastTensor": "_tensor",
    f"{_FLOAT8}.WeightWithDelayedFloat8CastTensor": "_tensor",
    f"{_FLOAT8}.WeightWithStaticFloat8CastTensor": "_tensor",
    f"{_GROUPED}.ScaledGroupedMMTensor": "_data",
    f"{_GROUPED}.Float8TrainingWeightWrapperTensor": "_data",
    f"{_GROUPED}.MXFP8TrainingWeightWrapperTensor": "_data",
    f"{_TRAINING}.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "_data",
    f"{_TRAINING}.bitnet.BitNetTrainingLinearWeight": "_data",
}
"""Classes of tensors that hold another -> the attribute with it.

Most are of weights that are cast when a layer uses them; their other attributes are settings and
scales of the next cast. Sources: torchao 0.9 to 0.18, torch 2.13.
"""


@dataclass(slots=True, eq=False)
class StoredBuffer:
    """One stored buffer; ``byte_offset`` is -1 until its position in the file is known."""

    file: str
    key: str
    dtype: DType
    nbytes: int
    byte_offset: int = -1
    views: int = 0  # the number of tensors that are views of it
    viewed: int = 0  # their bytes, without regard to those that they share or repeat


@dataclass(slots=True, eq=False)
class Tensor:
    """A strided view of a storage; shape, strides and offset in elements."""

    storage: StoredBuffer
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
        """A tuple that is equal for two tensors exactly if they are the same view."""
        return self.storage.file, self.storage.key, self.offset, self.shape, self.strides

    @property
    def byte_offset(self) -> int:
        """Position of the first element in the file; an empty view may begin anywhere."""
        offset = self.offset if self.numel else 0
        return self.storage.byte_offset + offset * self.dtype.itemsize

    @property
    def chunk(self) -> Chunk:
        """The whole tensor as one chunk of itself."""
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        return Chunk(whole(self.shape), self.storage.file, self.byte_offset, strides, self.dtype)


@dataclass(slots=True)
class TorchFile:
    """One opened file: the saved object, its storages, and the globals that its pickle names."""

    path: str
    nbytes: int
    root: Any
    globals: set[str]
    records: dict[str, Record] = field(default_factory=dict)  # storage key -> record
    archive: str = ""  # root name of the zip archive; empty for the older stream format
    stamp: Stamp | None = None  # not in `root`, from which the reader takes it
    is_known: bool = False  # whether a file that was read before has an equal pickle
    version: FileVersion | None = None

    def source(self) -> SourceFile:
        """Describe the file as a manifest lists it."""
        ordered = sorted(self.records.values(), key=lambda record: record.byte_offset)
        return SourceFile(
            self.path,
            self.nbytes,
            tuple(ordered),
            claims=self._list_claims(),
            version=self.version,
        )

    def _list_claims(self) -> tuple[Claim, ...]:
        claims = stamps.list_claims(self.stamp)
        if self.archive:
            claims.append(Claim(stamps.FILE_NAME, self.archive, "the name of its zip archive"))
        return tuple(claims)

    def read_number(self, tensor: Tensor) -> float | int:
        """Return the value of a one-element tensor, such as a step counter."""
        with SourceFiles({self.path: self}) as files:
            return read_number(files, tensor.chunk)


_BLOCK_BYTES = 1 << 20  # bytes that `is_zero` reads at a time
_NUMBERS = {
    "float32": "<f",
    "float64": "<d",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "uint8": "<B",
    "bool": "<?",
}


def read_number(files: SourceFiles, chunk: Chunk) -> float | int:
    """Read the value of a one-element chunk.

    Raises:
        UnsupportedError: the chunk has several elements, or a dtype that no counter has.
    """
    if chunk.box.volume != 1 or chunk.dtype.name not in _NUMBERS:
        raise UnsupportedError(
            chunk.file,
            f"contains a counter of dtype {chunk.dtype} and shape {chunk.box.shape}, which is not a"
            " number",
        )
    return _unpack(files, chunk, chunk.byte_offset)


def pack_number(value: float, dtype: DType) -> bytes:
    """Return the element of a tensor, as `read_number` read it."""
    form = _NUMBERS[dtype.name]
    return struct.pack(form, value if dtype.family == "float" else int(value))


def read_weight(files: SourceFiles, chunk: Chunk, at: int) -> float:
    """Read the element at a row-major position of a chunk; NaN unless it is a plain float."""
    start = chunk.byte_offset
    for extent, stride in zip(reversed(chunk.box.shape), reversed(chunk.byte_strides), strict=True):
        at, index = divmod(at, extent)
        start += index * stride
    if chunk.dtype == dtypes.BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        raw = files.read(chunk.file, start, chunk.dtype.itemsize)
        value: float = struct.unpack("<f", b"\0\0" + raw)[0]
        return value
    plain = chunk.dtype.family == "float" and chunk.dtype.name in _NUMBERS
    return float(_unpack(files, chunk, start)) if plain else float("nan")


def is_zero(files: SourceFiles, chunk: Chunk) -> bool:
    """Return whether every byte from the first to the last element of a chunk is zero."""
    first, stop = chunk.byte_span
    for start in range(first, stop, _BLOCK_BYTES):
        block = files.read(chunk.file, start, min(_BLOCK_BYTES, stop - start))
        if any(block):
            return False
    return True


def _unpack(files: SourceFiles, chunk: Chunk, start: int) -> float | int:
    raw = files.read(chunk.file, start, chunk.dtype.itemsize)
    value: float | int = struct.unpack(_NUMBERS[chunk.dtype.name], raw)[0]
    return value


class Storages:
    """Creates storages from persistent ids; one object for each key, so that views share it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.by_key: dict[str, StoredBuffer] = {}

    def __call__(self, pid: Any) -> StoredBuffer | Global:
        """Return the storage of a persistent id, or the class of a module.

        Raises:
            ValueError: the id is not that of a storage.
            UnsupportedError: the storage has no plain dtype.
        """
        # A stream has the source text of a module's class beside it
        # (serialization.py, `_legacy_save`).
        match pid:
            case ("module", Global() as kind, _, _):
                return kind
        # Streams have a sixth item, which torch 2.13 always writes as None
        # (serialization.py, `is_view`).
        tag, kind, key, _location, numel, *view = pid
        if tag != "storage" or not isinstance(kind, Global) or (view and view[0] is not None):
            raise ValueError("a persistent id that is not that of a storage")
        if not isinstance(key, (str, int)) or not _is_size(numel):
            raise ValueError("a storage without a key or of an impossible size")
        name = kind.name.rsplit(".", 1)[-1]
        dtype = dtypes.UINT8 if name == "UntypedStorage" else dtypes.BY_STORAGE.get(name)
        if dtype is None:
            raise UnsupportedError(self.path, f"contains a {kind.name}, which has no plain dtype")
        key = str(key)
        storage = StoredBuffer(self.path, key, dtype, numel * dtype.itemsize)
        return self.by_key.setdefault(key, storage)


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < _MAX_NUMEL


def _build_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None = None
) -> Tensor:
    if not isinstance(storage, StoredBuffer):
        raise TypeError("a tensor without a storage")
    shape, strides = tuple(shape), tuple(strides)
    if len(shape) != len(strides) or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor with an impossible shape, strides or offset")
    if len(shape) > MAX_DIMS:
        raise UnsupportedError(
            storage.file,
            f"contains a tensor of {len(shape)} dims; reshard reads up to {MAX_DIMS}, as torch's"
            " own operations do",
            "reshape the tensor, or leave it out of the state dict",
        )
    tensor = Tensor(storage, offset, shape, strides, dtype or storage.dtype)
    nbytes = tensor.nbytes
    storage.views += 1
    storage.viewed += nbytes
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if nbytes and (last + 1) * tensor.dtype.itemsize > storage.nbytes:
        raise ValueError(f"a tensor that extends beyond its storage of {storage.nbytes} bytes")
    return tensor


def check_views(
    path: str, storages: Iterable[StoredBuffer], nbytes: int, *, is_part: bool = False
) -> None:
    """Check that the tensors of a pickle are not much larger than the file that stores them.

    Tied weights share a storage, and ``expand`` repeats its elements. Without a limit, a tensor of
    a terabyte takes some hundred bytes.

    Args:
        nbytes: size of the file, or of the archive inside a larger file.
        is_part: whether the file has further archives, each with tensors of its own.

    Raises:
        CorruptError: the tensors are larger than that.
    """
    viewed = sum(storage.viewed for storage in storages)
    most = max(_MOST_REPEATED * nbytes, _LEAST_PART if is_part else _LEAST)
    if viewed > most:
        raise CorruptError(
            path,
            f"its tensors repeat their stored elements: they have {viewed:,} bytes in a file of"
            f" {nbytes:,}, and reshard reads at most {most:,}",
            f"if an expanded tensor in it is sound, save its clone(); else {ALTERED}",
        )


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
    return _build_tensor(storage, offset, shape, strides)


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
    kind = parse_dtype(dtype, getattr(storage, "file", "a tensor"))
    return _build_tensor(storage, offset, shape, strides, kind)


def _refuse_lazy(storage: Any, metadata: Any) -> None:
    """Refuse a lazily conjugated or negated tensor: its stored bits need a further operation."""
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        raise UnsupportedError(
            getattr(storage, "file", "a tensor"),
            "contains a tensor with a lazy conjugation or negation",
            "save the result of resolve_conj().resolve_neg()",
        )


def parse_dtype(dtype: Global, where: object) -> DType:
    """Return the dtype that a pickle names, such as ``torch.float32``.

    Raises:
        UnsupportedError: torch has the dtype and reshard cannot write it (``torch.complex32``).
        KeyError: torch has no such dtype.
    """
    name = dtype.name.removeprefix("torch.")
    if name not in dtypes.BY_NAME and _TORCH_DTYPE.fullmatch(dtype.name):
        raise UnsupportedError(
            where,
            f"contains a tensor of dtype {dtype.name}, which reshard does not support",
            "save the tensor in a plain dtype, or leave it out of the state dict",
        )
    return dtypes.BY_NAME[name]


def _get_first(value: Any, *_rest: Any) -> Any:
    return value


def _rebuild_typed(function: Global, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    # torch never nests these calls. Nested ones would recurse through `TORCH_BUILDERS`.
    if function.name.startswith("torch._tensor."):
        raise ValueError("a rebuild call whose argument is itself a rebuild call")
    builder = TORCH_BUILDERS.get(function.name)
    if builder:
        return builder(*args)
    if function.name != _WRAPPER or not isinstance(kind, Global):
        return Call(function.name, args, state)
    call = Call(kind.name, args, state)
    return _get_held(call, _HELD[kind.name]) if kind.name in _HELD else call


def _get_held(call: Call, attribute: str) -> Tensor:
    held = call.get(attribute)
    if not isinstance(held, Tensor):
        raise TypeError(f"a {call.name} without a tensor {attribute}")
    if call.args[1:3] != (Global(f"torch.{held.dtype}"), held.shape):
        raise ValueError(f"a {call.name} of another dtype or shape than its {attribute}")
    return held


def is_wrapped(value: Any) -> bool:
    """Return whether a tensor's class computes its elements, as torchao's quantized ones do."""
    kind = value.args[0] if isinstance(value, Call) and value.args else None
    return isinstance(kind, Global) and kind.name == value.name


TORCH_BUILDERS: dict[str, Builder] = {
    "torch._tensor._rebuild_from_type_v2": _rebuild_typed,
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _get_first,
    "torch._utils._rebuild_parameter_with_state": _get_first,
    "torch.Size": lambda dims=(): tuple(dims),
}
