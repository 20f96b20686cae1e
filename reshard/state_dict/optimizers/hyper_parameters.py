"""Read the hyper-parameters of param groups, and the counters of optimizers, as plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from reshard.containers.torch_objects import Tensor, pack_number, read_number
from reshard.core.box import Index
from reshard.core.dtypes import DType
from reshard.core.manifest import MEMBER_LISTS
from reshard.errors import UnsupportedError
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.plain_values import restore_sets, to_plain
from reshard.state_dict.tree import as_global, is_tensor
from reshard.system.files import SourceFiles

_LARGEST = 1e300  # of a counter: excludes inf, NaN and integers that no float holds


class TensorNumber(float):
    """The value of a hyper-parameter that the optimizer keeps as a tensor of one element."""

    def __new__(cls, value: float, _dtype: DType, _shape: Index) -> TensorNumber:
        """Return the number, which keeps the dtype and shape of its tensor."""
        return super().__new__(cls, value)

    def __init__(self, _value: float, dtype: DType, shape: Index) -> None:
        self.dtype, self.shape = dtype, shape

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments for a copy."""
        return float(self), self.dtype, self.shape


def read_hyper(
    group: Mapping[str, Any], pool: SourceFiles | None = None, *, skip: Collection[str] = ()
) -> dict[str, Any]:
    """Return the hyper-parameters of a param group.

    Args:
        pool: reads a hyper-parameter that is a tensor, as a learning rate may be.
        skip: keys beside the list of members that are not hyper-parameters.
    """
    hyper = {}
    for name, value in group.items():
        if name not in (*MEMBER_LISTS, *skip):
            number = _read_tensor(value, pool)
            hyper[str(name)] = to_plain(value) if number is None else number
    return hyper


def build_tensors(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters for a pickle, with a tensor for each number that was one."""
    from reshard.containers.torch_writer import Storage, StorageView

    return {
        name: StorageView(
            Storage(value.dtype, 1, data=pack_number(value, value.dtype)), value.shape
        )
        if isinstance(value, TensorNumber)
        else restore_sets(value)
        for name, value in hyper.items()
    }


def _read_tensor(value: Any, pool: SourceFiles | None) -> TensorNumber | None:
    if isinstance(value, Tensor):  # from one file, before the ranks' values were joined
        value = GlobalTensor(value.dtype, value.shape, (value.chunk,))
    if not is_tensor(value):
        return None
    if pool is None:
        with SourceFiles() as files:
            return _read_tensor(value, files)
    number, tensor = read_counter(value, pool), as_global(value)
    if number is None or tensor is None:
        return None
    return TensorNumber(number, tensor.dtype, tensor.shape)


def read_counter(value: Any, pool: SourceFiles) -> float | None:
    """Return the value of a counter: a plain number or a tensor of one element."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value if abs(value) < _LARGEST else None
    tensor = as_global(value)
    if tensor is None or prod(tensor.shape) != 1 or not tensor.chunks:
        return None
    with contextlib.suppress(UnsupportedError):  # a dtype that no counter has
        return float(read_number(pool, tensor.chunks[0]))
    return None
