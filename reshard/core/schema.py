"""Declared structure of the values in a pickle or a document, checked before they are used.

A format's reader takes values out of dicts that may contain anything. It declares the values that
it uses, and `expect` reports the first one of another kind: the file, the key, and the value.

>>> groups = fields(param_groups=sequence(mapping(TEXT)), step=INTEGER)
>>> expect("x.pt", {"step": 3}, groups)
>>> expect("x.pt", {"param_groups": [{1: 2}]}, groups)
Traceback (most recent call last):
reshard.errors.CorruptError: x.pt: param_groups[0] has the key 1, expected a string
  -> it was altered, or written by a version that reshard does not support
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from reshard.core.box import as_index
from reshard.errors import CorruptError, shown

Fault = tuple[str, str]  # where within the value, and what is wrong there
_REMEDY = "it was altered, or written by a version that reshard does not support"


class Kind(NamedTuple):
    """A kind of value.

    Args:
        name: name of the kind in messages.
        fault: function that returns the first fault of a value, or None.
    """

    name: str
    fault: Callable[[Any], Fault | None]


def expect(where: object, value: Any, kind: Kind, what: str = "") -> None:
    """Check that a value is of a kind.

    Args:
        what: the value's key, if it is a part of the file.

    Raises:
        CorruptError: the value is of another kind.
    """
    fault = kind.fault(value)
    if fault:
        key, problem = what + fault[0], fault[1]
        raise CorruptError(where, f"{key.lstrip('.') or 'the content'} {problem}", _REMEDY)


def make_kind(name: str, holds: Callable[[Any], bool]) -> Kind:
    """Return the kind of the values for which a predicate is true."""

    def fault(value: Any) -> Fault | None:
        return None if holds(value) else ("", f"is {shown(value)}, expected {name}")

    return Kind(name, fault)


def _is_shape(value: Any) -> bool:
    try:
        as_index(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


ANY = make_kind("anything", lambda _value: True)
TEXT = make_kind("a string", lambda value: isinstance(value, str))
INTEGER = make_kind(
    "an integer", lambda value: type(value) is int
)  # not a bool, which is an int, too
WHOLE = make_kind("an integer", lambda value: type(value) is int or _is_whole(value))  # or 3.0
COUNT = make_kind("a number of at least 0", lambda value: type(value) is int and value >= 0)
NUMBER = make_kind("a number", lambda value: isinstance(value, (int, float)))
SHAPE = make_kind("a shape", _is_shape)


def maybe(kind: Kind) -> Kind:
    """Return the kind of values that are None or of the given kind."""
    return Kind(kind.name, lambda value: None if value is None else kind.fault(value))


def either(*kinds: Kind) -> Kind:
    """Return the kind of values of one of several kinds. The fault is the innermost one."""
    name = " or ".join(kind.name for kind in kinds)

    def fault(value: Any) -> Fault | None:
        faults = [kind.fault(value) for kind in kinds]
        if not all(faults):
            return None
        # A fault inside the value is more specific than that the whole value is of another kind.
        within = next((fault for fault in faults if fault and fault[0]), None)
        return within or ("", f"is {shown(value)}, expected {name}")

    return Kind(name, fault)


def sequence(item: Kind = ANY) -> Kind:
    """Return the kind of lists and tuples whose items are all of one kind."""
    of = make_kind("a list", lambda value: isinstance(value, (list, tuple)))

    def fault(value: Any) -> Fault | None:
        if item is ANY or not isinstance(value, (list, tuple)):
            return of.fault(value)
        return _first((f"[{at}]", item.fault(element)) for at, element in _once(enumerate(value)))

    return Kind("a list", fault)


def mapping(key: Kind = ANY, item: Kind = ANY) -> Kind:
    """Return the kind of dicts, by the kinds of their keys and values."""
    of = make_kind("a dict", lambda value: isinstance(value, dict))

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return of.fault(value)
        for element in value if key is not ANY else ():
            if key.fault(element):
                return "", f"has the key {shown(element)}, expected {key.name}"
        pairs = _once(value.items()) if item is not ANY else ()
        return _first((f"[{shown(at)}]", item.fault(element)) for at, element in pairs)

    return Kind("a dict", fault)


def numbered(item: Kind) -> Kind:
    """Return the kind of dicts whose values under numbers are of a kind; others may be anything."""
    of = mapping(item=item)

    def fault(value: Any) -> Fault | None:
        if isinstance(value, dict) and any(isinstance(key, str) for key in value):
            value = {key: element for key, element in value.items() if not isinstance(key, str)}
        return of.fault(value)

    return Kind("a dict", fault)


def fields(**known: Kind) -> Kind:
    """Return the kind of dicts by the kinds of some keys, which may be missing."""
    of = mapping()

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return of.fault(value)
        present = ((name, kind) for name, kind in known.items() if name in value)
        return _first((f".{name}", kind.fault(value[name])) for name, kind in present)

    return Kind("a dict", fault)


def record(**known: Kind) -> Kind:
    """Return the kind of dicts that have all of these keys."""
    some = fields(**known)

    def fault(value: Any) -> Fault | None:
        missing = [name for name in known if isinstance(value, dict) and name not in value]
        return ("", f"has no {missing[0]!r}") if missing else some.fault(value)

    return Kind("a dict", fault)


def row(*items: Kind) -> Kind:
    """Return the kind of lists and tuples with one item of each of these kinds."""
    of = make_kind(
        f"a list of {len(items)}", lambda v: sequence().fault(v) is None and len(v) == len(items)
    )

    def fault(value: Any) -> Fault | None:
        pairs = zip(items, value, strict=True) if of.fault(value) is None else ()
        return of.fault(value) or _first(
            (f"[{at}]", kind.fault(item)) for at, (kind, item) in enumerate(pairs)
        )

    return Kind(of.name, fault)


def _once(parts: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield each container once: a small pickle can refer to one a billion times."""
    seen: set[int] = set()
    for at, part in parts:
        if not isinstance(part, (dict, list, tuple)):
            yield at, part
        elif id(part) not in seen:
            seen.add(id(part))
            yield at, part


def _first(parts: Iterable[tuple[str, Fault | None]]) -> Fault | None:
    return next(((at + fault[0], fault[1]) for at, fault in parts if fault), None)
