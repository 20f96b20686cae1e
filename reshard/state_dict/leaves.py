"""The balance of a state dict: what becomes of each of its values, so that none is lost unseen.

A tensor by itself is a weight. Any other value is opaque: it is named in the report. A value that
holds tensors which look like weights, where nobody looks for weights, is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from reshard.containers import numpy_arrays
from reshard.containers.torch_objects import Storage, Tensor, is_wrapped
from reshard.errors import IncompleteError, UnsupportedError
from reshard.pickles.values import Call
from reshard.state_dict.tree import GlobalTensor, LocalTensors, is_tensor
from reshard.units import counted, some

_CONTAINERS = (dict, list, tuple)
_LISTED = 4


def find_opaque(
    where: object, state: Mapping[Any, Any], known: Container[Any] = (), *, prefix: str = ""
) -> dict[str, str]:
    """Return the values of a model's state dict that are no tensors: name -> what it is.

    Args:
        known: keys whose values somebody else reads.
        prefix: of the names.

    Raises:
        UnsupportedError: a weight is stored in a way that cannot be read.
        IncompleteError: values hold weights where none are read, as a list of tensors does.
    """
    found: dict[str, str] = {}
    hidden: list[str] = []
    for key, value in state.items():
        if key in known or is_tensor(value) or isinstance(value, Tensor):
            continue
        name = f"{prefix}{key}"
        _refuse_unreadable(where, name, value)
        held = list(find_weights(value, name))
        hidden += held
        if not held:
            found[name] = _describe_kind(value)
    if hidden:
        raise IncompleteError(
            where,
            f"{counted(len(hidden), 'tensor')} of the model would be left out: {some(hidden)}"
            " lie in lists or dicts inside the state dict, where no module keeps its weights",
            "save them under names of their own, as Module.state_dict() does",
        )
    return found


def find_weights(value: Any, name: str) -> Iterator[str]:
    """Yield the places of tensors in a container that look like weights: floats, more than one."""
    seen: set[int] = set()
    waiting = [(name, value)]
    for at, held in waiting:
        if isinstance(held, _CONTAINERS):
            if id(held) not in seen:
                seen.add(id(held))
                items = held.items() if isinstance(held, dict) else enumerate(held)
                waiting += [(f"{at}.{key}", item) for key, item in items]
        elif looks_like_weight(held):
            yield at


def looks_like_weight(value: Any) -> bool:
    """Return whether a value is a float tensor, or array, of more than one element."""
    if isinstance(value, LocalTensors):
        return any(
            chunk.dtype.family not in ("int", "bool") and chunk.box.volume > 1
            for chunk in value.pieces.values()
        )
    if isinstance(value, GlobalTensor):
        return (
            value.dtype.family not in ("int", "bool")
            and 0 not in value.shape
            and any(extent > 1 for extent in value.shape)
        )
    if isinstance(value, Tensor):
        return value.dtype.family not in ("int", "bool") and value.numel > 1
    return isinstance(value, Storage) or is_wrapped(value)


def _refuse_unreadable(where: object, name: str, value: Any) -> None:
    """Refuse a weight whose elements only its own class can compute, or that is no tensor's dtype.

    Raises:
        UnsupportedError: naming it.
    """
    if is_wrapped(value):
        raise UnsupportedError(
            where,
            f"{name} is a {value.name}, whose elements only its own class can compute",
            "save the model's plain tensors: before it is quantised, or dequantised",
        )
    reason = numpy_arrays.obstacle(value)
    if reason:
        raise UnsupportedError(
            where, f"{name} is {reason}", "save it as a torch tensor of a plain dtype"
        )


def _describe_kind(value: Any) -> str:
    if isinstance(value, Call):
        return value.name
    return "bytes" if isinstance(value, bytes) else type(value).__name__
