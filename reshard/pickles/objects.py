"""Keep values that do not print (enums, dtypes, namespaces) as a pickle describes them.

A manifest shows such a value in words. A target that is a pickle itself writes the description
again: the names that it was made of, never imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from reshard.pickles import trust
from reshard.pickles.values import Call, Global

NAMESPACE = "argparse.Namespace"

_PLAIN = (str, int, float, bool, complex, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)


def can_be_written(value: Any) -> bool:
    """Whether a pickle can hold the value again: no tensor, and no name that is not expected."""
    return all(map(_is_known, _parts(value)))


def _is_known(part: Any) -> bool:
    if isinstance(part, (Global, Call)):
        return trust.expected(part.name)
    return isinstance(part, _CONTAINERS) or type(part) in _PLAIN


def _parts(value: Any) -> Iterator[Any]:
    """Yield the value and every part of it once, however often it stands there."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        yield part
        if id(part) in seen or not isinstance(part, (Call, *_CONTAINERS)):
            continue
        seen.add(id(part))
        if isinstance(part, Call):
            waiting += (part.args, part.state, part.items, part.elements)
        else:
            waiting += [*part.keys(), *part.values()] if isinstance(part, dict) else part


def kept(root: Mapping[Any, Any], names: Iterable[Any]) -> dict[str, Any]:
    """Return those of a pickle's values that do not print and can be written again.

    A namespace is kept without the attributes that cannot.
    """
    found = {str(name): _writable(root[name]) for name in names}
    return {
        name: value
        for name, value in found.items()
        if any(isinstance(part, (Global, Call)) for part in _parts(value)) and can_be_written(value)
    }


def left_out(name: str, described: Any, value: Any) -> list[str]:
    """Return the attributes of a namespace that `kept` left out, by dotted name.

    Args:
        described: the namespace as a manifest shows it.
    """
    if not is_namespace(value) or not isinstance(described, Mapping):
        return []
    state = described.get("state", {})
    return [f"{name}.{key}" for key in state if key not in value.state]


def is_namespace(value: Any) -> TypeGuard[Call]:
    """Whether a value is an ``argparse.Namespace`` with its attributes."""
    return isinstance(value, Call) and value.name == NAMESPACE and isinstance(value.state, dict)


def attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of a namespace; none of anything else."""
    return value.state if is_namespace(value) else {}


def with_attributes(value: Call, new: Mapping[str, Any]) -> Call:
    """Return a namespace with other values of these attributes, as far as it has them."""
    changed = {name: item for name, item in new.items() if name in value.state}
    return replace(value, state={**value.state, **changed})


def _writable(value: Any) -> Any:
    if not is_namespace(value):
        return value
    held = {key: part for key, part in value.state.items() if can_be_written(part)}
    return replace(value, state=held)
