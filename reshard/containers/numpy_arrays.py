"""Read numpy arrays and bare storages in the pickles of ``torch.save`` as tensors.

An array's elements are in the pickle itself: raw in protocol 3 and later, as text in protocol 2,
which ``torch.save`` uses (see `reshard.system.escaped`). Its dtype is a call of its own.

Sources: numpy 2.3 ``numpy/_core/src/multiarray/methods.c`` (``array_reduce``,
``array_reduce_ex_picklebuffer``), ``descriptor.c`` (``arraydescr_reduce``), ``scalartypes.c.src``
(``gentype_reduce``).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from reshard.containers.pickles.unpickle import Unpickled
from reshard.containers.pickles.values import (
    Call,
    Global,
    Located,
    rebuild_dict,
    rebuild_sequence,
)
from reshard.containers.torch_objects import StoredBuffer, Tensor
from reshard.core import dtypes
from reshard.core.box import Index, as_index, row_major
from reshard.core.dtypes import DType
from reshard.errors import CorruptError
from reshard.system import escaped

_CORES = ("numpy.core", "numpy._core")  # before numpy 2, and since
_ARRAYS = frozenset(f"{core}.multiarray._reconstruct" for core in _CORES)
_SCALARS = frozenset(f"{core}.multiarray.scalar" for core in _CORES)
_BUFFERS = frozenset(f"{core}.numeric._frombuffer" for core in _CORES)
NAMES = _ARRAYS | _SCALARS | _BUFFERS
_TWISTER = "MT19937"  # first item of the tuple that ``numpy.random.get_state`` returns
_DTYPES: Mapping[str, DType] = {  # numpy's kind and size
    "f2": dtypes.FLOAT16,
    "f4": dtypes.FLOAT32,
    "f8": dtypes.FLOAT64,
    "b1": dtypes.BY_NAME["bool"],
    **{f"i{n}": dtypes.BY_NAME[f"int{8 * n}"] for n in (1, 2, 4, 8)},
    **{f"u{n}": dtypes.BY_NAME[f"uint{8 * n}"] for n in (1, 2, 4, 8)},
    "c8": dtypes.BY_NAME["complex64"],
    "c16": dtypes.BY_NAME["complex128"],
}
_KINDS = {"O": "object", "V": "structured", "U": "text", "S": "bytes", "M": "date", "m": "time"}
_CODES = {  # of `struct`
    dtypes.FLOAT16: "e",
    dtypes.FLOAT32: "f",
    dtypes.FLOAT64: "d",
    dtypes.BY_NAME["bool"]: "?",
    **{dtypes.BY_NAME[f"int{8 << n}"]: code for n, code in enumerate("bhiq")},
    **{dtypes.BY_NAME[f"uint{8 << n}"]: code for n, code in enumerate("BHIQ")},
    dtypes.BY_NAME["complex64"]: "2f",
    dtypes.BY_NAME["complex128"]: "2d",
}


class _UnreadableError(Exception):
    """An array that no tensor can represent; the message completes "X is ..."."""


def has_arrays(pickle: Unpickled, storages: Iterable[StoredBuffer]) -> bool:
    """Return whether a pickle holds arrays, or storages that no tensor is a view of."""
    return not NAMES.isdisjoint(pickle.globals) or not all(s.views for s in storages)


def find_obstacle(value: Any) -> str:
    """Return why an object is an array that cannot be read; empty for any other object."""
    if not isinstance(value, Call) or value.name not in NAMES:
        masked = isinstance(value, Call) and value.name.startswith("numpy.ma.")
        return "a masked numpy array" if masked else ""
    try:
        _parse_array(value)
    except _UnreadableError as error:
        return str(error)
    return "a numpy array of unknown form"


def convert(root: Any, file: str, start: int) -> Any:
    """Return a saved object in which every array and bare storage is a `Tensor`.

    Arrays that cannot be read as a tensor, and numpy's random states (recognized by their form),
    stay as they are; `find_obstacle` returns why. A numpy scalar becomes a tensor among tensors,
    else a number.

    Args:
        start: byte of the file at which its pickle begins.

    Raises:
        CorruptError: the containers are nested too deep.
    """
    try:
        return _ArrayConverter(file, start).convert(root)
    except RecursionError as error:
        raise CorruptError(file, "its containers are nested too deep") from error


class _ArrayConverter:
    """Copies containers, each once, and replaces arrays with tensors."""

    def __init__(self, file: str, start: int) -> None:
        self._file, self._start = file, start
        self._done: dict[int, Any] = {}
        self._shared: Counter[int] = Counter()  # byte -> number of arrays whose text begins there

    def convert(self, value: Any) -> Any:
        if isinstance(value, (dict, list, tuple)):
            if id(value) not in self._done:
                self._done[id(value)] = value  # a cycle ends here, as it is
                self._done[id(value)] = self._convert_container(value)
            return self._done[id(value)]
        if isinstance(value, StoredBuffer):
            return Tensor(value, 0, (value.nbytes // value.dtype.itemsize,), (1,), value.dtype)
        if isinstance(value, Call) and value.name in NAMES:
            if id(value) not in self._done:
                self._done[id(value)] = self._convert_array(value)
            return self._done[id(value)]
        return value

    def _convert_container(self, value: Any) -> Any:
        if isinstance(value, dict):
            converted = {key: self.convert(item) for key, item in value.items()}
            return rebuild_dict(value, self._with_numbers(converted))
        if isinstance(value, tuple) and value[:1] == (_TWISTER,):
            return value
        items = self._with_numbers(dict(enumerate(map(self.convert, value)))).values()
        return rebuild_sequence(value, items)

    def _with_numbers(self, items: dict[Any, Any]) -> dict[Any, Any]:
        beside_tensor = any(isinstance(v, Tensor) and not _is_scalar(v) for v in items.values())
        if beside_tensor or not any(map(_is_scalar, items.values())):
            return items
        return {key: v.value if isinstance(v, _Scalar) else v for key, v in items.items()}

    def _convert_array(self, call: Call) -> Any:
        try:
            dtype, shape, strides, data = _parse_array(call)
            storage = self._locate_storage(dtype, data)
        except _UnreadableError:
            return call
        if call.name in _SCALARS:
            number = _unpack_number(dtype, data)
            return _Scalar(number, call, storage, 0, shape, strides, dtype)
        return Array(call, storage, 0, shape, strides, dtype)

    def _locate_storage(self, dtype: DType, data: bytes) -> StoredBuffer:
        if not data:
            return StoredBuffer(self._file, "numpy", dtype, 0, self._start)
        if not isinstance(data, Located):
            raise _UnreadableError("a numpy array whose bytes have no offset")
        at, key = self._start + data.at, f"numpy {data.at}"
        if data.text_nbytes is None:
            return StoredBuffer(self._file, key, dtype, len(data), at)
        self._shared[at] += 1
        number = self._shared[at] - 1
        text = escaped.EscapedText(self._file, at, data.text_nbytes, len(data), number)
        return StoredBuffer(escaped.make_name(text), key, dtype, len(data), 0)


class Array(Tensor):
    """A numpy array as a tensor.

    Attributes:
        call: the array as the pickle describes it, with its elements.
    """

    __slots__ = ("call",)

    def __init__(self, call: Call, *tensor: Any) -> None:
        self.call = call
        super().__init__(*tensor)


class _Scalar(Array):
    __slots__ = ("value",)

    def __init__(self, value: Any, call: Call, *tensor: Any) -> None:
        self.value = value
        super().__init__(call, *tensor)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _Scalar)


def _unpack_number(dtype: DType, data: bytes) -> Any:
    number, *imaginary = struct.unpack(f"<{_CODES[dtype]}", data)
    return complex(number, *imaginary) if imaginary else number


def _parse_array(call: Call) -> tuple[DType, Index, Index, bytes]:
    """Return dtype, shape, strides in elements, and data of an array or a scalar."""
    shape: Any
    try:
        if call.name in _SCALARS:
            (dtype, data), shape, by_columns = call.args, (), False
        elif call.name in _BUFFERS:
            data, dtype, shape, order = call.args
            by_columns = order == "F"
        else:
            _expect_ndarray(call.args[0])
            _version, shape, dtype, by_columns, data = call.state or (1, (0,), None, False, b"")
        torch_dtype = _parse_dtype(dtype)
        shape = as_index(shape)
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise _UnreadableError(f"a numpy array that reshard cannot read ({error})") from error
    if not isinstance(data, bytes) or len(data) != prod(shape) * torch_dtype.itemsize:
        raise _UnreadableError(
            f"a numpy array of {torch_dtype} {shape} whose data have another size"
        )
    return torch_dtype, shape, _build_strides(shape, by_columns=bool(by_columns)), data


def _expect_ndarray(kind: Any) -> None:
    if not isinstance(kind, Global) or kind.name != "numpy.ndarray":
        raise _UnreadableError(f"a numpy array of the class {getattr(kind, 'name', kind)}")


def _parse_dtype(call: Any) -> DType:
    """Return the torch dtype of ``numpy.dtype('f4')``, whose state gives the byte order."""
    if not isinstance(call, Call) or call.name != "numpy.dtype" or not call.args:
        raise _UnreadableError("a numpy array of unknown dtype")
    kind = call.args[0]
    # numpy pickles the byte order in the dtype's state: its name 'f4' stands for either order.
    order = call.state[1] if isinstance(call.state, tuple) and len(call.state) > 1 else "|"
    if not isinstance(kind, str) or kind not in _DTYPES:
        letter = kind[:1] if isinstance(kind, str) else ""
        raise _UnreadableError(f"a numpy array of {_KINDS.get(letter, 'unknown')} dtype ({kind})")
    if order == ">":
        raise _UnreadableError(f"a big-endian numpy array (>{kind})")
    return _DTYPES[kind]


def _build_strides(shape: Index, *, by_columns: bool) -> Index:
    if not by_columns:
        return row_major(shape)
    # Column-major order is the row-major order of the reversed shape.
    return row_major(shape[::-1])[::-1]
