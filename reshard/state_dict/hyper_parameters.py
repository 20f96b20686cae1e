"""Read the hyper-parameters of param groups, and the counters of optimizers, as plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from reshard.containers.torch_objects import read_number
from reshard.errors import UnsupportedError
from reshard.files import SourceFiles
from reshard.state_dict.plain_values import to_plain
from reshard.state_dict.tree import as_global, is_tensor

_MEMBERS = ("params", "param_names")
_LARGEST = 1e300  # of a counter: excludes inf, NaN and integers that no float holds


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
        if name not in (*_MEMBERS, *skip):
            number = read_counter(value, pool) if pool and is_tensor(value) else None
            hyper[str(name)] = to_plain(value) if number is None else number
    return hyper


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
