"""Inspect a script's own values (enums, namespaces, tensors) as a pickle describes them.

A manifest shows such a value as text. A target that is a pickle itself writes the description
again, by the names in it, which are never imported here. `state_dict.own_values` makes the
descriptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from reshard.containers.pickles import trust
from reshard.containers.pickles.values import Call, DictObject, Global, ListObject, Located

NAMESPACE = "argparse.Namespace"
SCHEDULER = "<scheduler>"  # name of the scheduler's state among these values

_PLAIN = (str, int, float, bool, complex, bytes, Located, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
OF_CALLS = ("args", "state", "items", "elements")
_DEEPEST = 30  # nested containers; `Pickler` allows about three times as many


def can_be_written(value: Any, *others: type) -> bool:
    """Return whether a pickle can hold the value again: every name in it is an expected one.

    Args:
        others: types that the target's pickler writes besides plain values and descriptions.
    """
    return _is_shallow(value) and all(
        isinstance(part, others) or _is_known(part) for part in iterate_parts(value)
    )


def _is_shallow(value: Any) -> bool:
    # This goes by levels, not by recursion, because a hostile value may be nested without end.
    level, seen = [value], set[int]()
    for _ in range(_DEEPEST):
        if not level:
            return True
        below = [part for holder in level for part in _list_parts(holder) if id(part) not in seen]
        seen.update(map(id, below))
        level = below
    return not level


def _is_known(part: Any) -> bool:
    if isinstance(part, (Global, Call)):
        return trust.is_expected(part.name)
    if isinstance(part, (DictObject, ListObject)):  # contains itself, so it was not replaced
        return False
    return isinstance(part, _CONTAINERS) or type(part) in _PLAIN


def iterate_parts(value: Any) -> Iterator[Any]:
    """Yield the value and each of its parts; a container that occurs twice is entered once."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        yield part
        if id(part) in seen or not isinstance(part, (Call, *_CONTAINERS)):
            continue
        seen.add(id(part))
        waiting += _list_parts(part)


def _list_parts(part: Any) -> Collection[Any]:
    if isinstance(part, Call):
        return [getattr(part, name) for name in OF_CALLS]
    if isinstance(part, dict):
        return [*part.keys(), *part.values()]
    return part if isinstance(part, _CONTAINERS) else ()


def list_left_out(name: str, described: Any, value: Any) -> list[str]:
    """Return the attributes of a namespace that were left out, by dotted name.

    Args:
        described: the namespace as a manifest shows it.
    """
    if not is_namespace(value) or not isinstance(described, Mapping):
        return []
    state = described.get("state", {})
    return [f"{name}.{key}" for key in state if key not in value.state]


def is_namespace(value: Any) -> TypeGuard[Call]:
    """Return whether a value is an ``argparse.Namespace`` with its attributes."""
    return isinstance(value, Call) and value.name == NAMESPACE and isinstance(value.state, dict)


def with_attributes(value: Call, new: Mapping[str, Any]) -> Call:
    """Return a namespace with new values for those of these attributes that it has."""
    changed = {name: item for name, item in new.items() if name in value.state}
    return replace(value, state={**value.state, **changed})
