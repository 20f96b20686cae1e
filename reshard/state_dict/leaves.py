"""Account for each value of a state dict, so that nothing is lost silently.

A tensor by itself is a weight. Any other value is opaque: the report names it. A container with
tensors that look like weights is refused, because nothing reads weights there; only what a module's
own ``get_extra_state`` returns may have any content.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from reshard.containers import numpy_arrays
from reshard.containers.pickles.script_values import iterate_parts
from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import StoredBuffer, Tensor, is_wrapped
from reshard.errors import IncompleteError, UnsupportedError
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import LocalTensors, is_tensor
from reshard.units import abridge, counted

_CONTAINERS = (dict, list, tuple)
_PARAMETERS = ("weight", "bias")  # what most modules of torch.nn call theirs
_EXTRA_STATE = "_extra_state"  # torch 2.13 ``nn/modules/module.py``, ``_EXTRA_STATE_KEY_SUFFIX``


def find_opaque(
    where: object, state: Mapping[Any, Any], known: Container[Any] = (), *, prefix: str = ""
) -> dict[str, str]:
    """Return the values of a model's state dict that are not tensors: name -> kind.

    Args:
        known: keys whose values other code reads.
        prefix: text before each name.

    Raises:
        UnsupportedError: a weight is stored in a way that cannot be read.
        IncompleteError: a container holds weights, as a list of tensors does.
    """
    kinds: dict[str, str] = {}
    hidden: list[str] = []
    for key, value in state.items():
        if key in known or is_tensor(value) or isinstance(value, Tensor):
            continue
        name = f"{prefix}{key}"
        _refuse_unreadable(where, name, value)
        weights = [] if is_extra_state(key) else list(find_weights(value, name))
        hidden += weights
        if not weights:
            kinds[name] = _describe_kind(value)
    if hidden:
        raise IncompleteError(
            where,
            f"{counted(len(hidden), 'tensor')} of the model would be left out, because modules"
            f" store no weights in lists or dicts inside their state dict: {abridge(hidden)}",
            "save them under their own names, as Module.state_dict() does",
        )
    return kinds


def is_extra_state(key: Any) -> bool:
    """Return whether a value of a state dict is what a module's ``get_extra_state`` returned."""
    return isinstance(key, str) and key.endswith(_EXTRA_STATE)


def find_weights(value: Any, name: str) -> Iterator[str]:
    """Yield the paths of tensors in a container that look like weights."""
    seen: set[int] = set()
    waiting = [(name, value)]
    for at, item in waiting:  # the list grows meanwhile
        if isinstance(item, _CONTAINERS):
            if id(item) not in seen:
                seen.add(id(item))
                items = item.items() if isinstance(item, dict) else enumerate(item)
                waiting += [(f"{at}.{key}", item) for key, item in items]
        elif _looks_like_weight(item) or (isinstance(item, Call) and _is_parameter(name, item)):
            yield at


def _looks_like_weight(value: Any) -> bool:
    # Integers and single values are usually counters or settings, which a report only names.
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
    return isinstance(value, StoredBuffer) or is_wrapped(value)


def _refuse_unreadable(where: object, name: str, value: Any) -> None:
    reason = numpy_arrays.find_obstacle(value)
    if reason:
        raise UnsupportedError(
            where, f"{name} is {reason}", "save it as a torch tensor of a plain dtype"
        )
    if isinstance(value, Call) and is_wrapped(value) and value.get("_ori_shape"):
        raise UnsupportedError(
            where,
            f"{name} is a {value.name}, xtuner's weight of FP8 training: rows of padding may"
            " follow its own, which reshard does not cut off",
            "save the model with xtuner's save_hf",
        )
    if isinstance(value, Call) and not is_extra_state(name) and _is_parameter(name, value):
        raise UnsupportedError(
            where,
            f"{name} is a {value.name}, whose elements only its own class can compute",
            "save the model's plain tensors, before quantisation or after dequantisation"
            " (--allow-pickle cannot help: reshard executes no class of a checkpoint)",
        )


def _is_parameter(name: str, value: Call) -> bool:
    # The name of a module's tensor has the path of the module. Without one, the object may be a
    # script's own, beside the weights at the top level of a file.
    path, _, last = name.rpartition(".")
    return (
        is_wrapped(value)
        or last in _PARAMETERS
        or (bool(path) and any(map(_has_elements, iterate_parts(value))))
    )


def _has_elements(part: Any) -> bool:
    # Codes of quantised weights are integers, so the dtype does not matter here.
    return isinstance(part, StoredBuffer) or (isinstance(part, Tensor) and part.numel > 1)


def _describe_kind(value: Any) -> str:
    if isinstance(value, Call):
        return value.name
    return "bytes" if isinstance(value, bytes) else type(value).__name__
