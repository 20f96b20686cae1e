"""Flatten a parameter's nested optimizer state into slots with joined names, and restore it.

bitsandbytes keeps all tensors of a parameter in a dict of its own
(``__bnb_optimizer_quant_state__``), Shampoo and SOAP keep lists of them. heavyball (3.2) has a dict
for each part of a parameter that it merges or divides, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reshard.state_dict.tree import as_list

JOINT = "/"
_DEEPEST = 8  # levels, more than any known optimizer nests


def flatten(
    state: Mapping[str, Any], is_tensor: Callable[[Any], bool], deepest: int = _DEEPEST
) -> dict[str, Any]:
    """Return the state without dicts and lists that contain tensors.

    >>> flatten({"step": 3, "GG": [b"t", None]}, lambda value: isinstance(value, bytes))
    {'step': 3, 'GG/0': b't', 'GG/1': None}
    """
    flat: dict[str, Any] = {}
    for name, value in state.items():
        parts = _list_parts(value) if deepest else None
        nested = flatten(parts, is_tensor, deepest - 1) if parts else {}
        if any(map(is_tensor, nested.values())):
            flat.update((f"{name}{JOINT}{key}", item) for key, item in nested.items())
        else:
            flat[name] = value
    return flat


def unflatten(state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state with its dicts and lists again.

    >>> unflatten({"step": 3, "GG/1": "t", "GG/0": None})
    {'step': 3, 'GG': [None, 't']}
    >>> unflatten({"0/exp_avg": "t"})
    {0: {'exp_avg': 't'}}
    """
    root: dict[Any, Any] = {}
    for name, value in state.items():
        *above, last = name.split(JOINT) if is_nested(name) else [name]
        node = root
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return {
        int(name) if name.isdecimal() else name: _restore_lists(value)
        for name, value in root.items()
    }


def is_nested(name: object) -> bool:
    """Return whether `flatten` joined a slot's name."""
    return isinstance(name, str) and JOINT in name


def _list_parts(value: Any) -> Mapping[str, Any] | None:
    """Return a container's items by name or position; None if no name could be split again."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return None if any(key.isdecimal() or JOINT in key for key in value) else value
    # `unflatten` would restore a tuple as a list.
    items = None if isinstance(value, tuple) else as_list(value)
    return None if items is None else {str(at): item for at, item in enumerate(items)}


def _restore_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {name: _restore_lists(item) for name, item in value.items()}
    order = [str(at) for at in range(len(items))]
    return [items[at] for at in order] if items and items.keys() == set(order) else items
