"""What a section of a pickle or a document must be: said once, held at the door.

A format's reader takes values out of dicts that may hold anything. It lists those that it takes,
and `expect` names the first that is of another kind: in which file, where, what stands there.

>>> groups = fields(param_groups=sequence(mapping(TEXT)), step=INTEGER)
>>> expect("x.pt", {"step": 3}, groups)
>>> expect("x.pt", {"param_groups": [{1: 2}]}, groups)
Traceback (most recent call last):
reshard.errors.CorruptError: x.pt: param_groups[0] has 1 as a key, where a text is expected
  -> it was altered, or written by a version that reshard does not know
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from reshard.box import as_index
from reshard.errors import CorruptError, shown

Fault = tuple[str, str]  # where within the value, and what is wrong there
_REMEDY = "it was altered, or written by a version that reshard does not know"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Args:
        name: as it stands in a message.
        fault: the first thing of a value that is of another kind, if there is one.
    """

    name: str
    fault: Callable[[Any], Fault | None]


def expect(where: object, value: Any, kind: Kind, what: str = "") -> None:
    """Hold a value to its kind.

    Args:
        what: the value's own name, where it is a part of the file.

    Raises:
        CorruptError: it is of another.
    """
    fault = kind.fault(value)
    if fault:
        place, problem = what + fault[0], fault[1]
        raise CorruptError(where, f"{place.lstrip('.') or 'what it holds'} {problem}", _REMEDY)


def a(name: str, holds: Callable[[Any], bool]) -> Kind:
    """The kind of those values of which a predicate holds."""

    def fault(value: Any) -> Fault | None:
        return None if holds(value) else ("", f"is {shown(value)}, where {name} is expected")

    return Kind(name, fault)


def _is_shape(value: Any) -> bool:
    try:
        as_index(value)
    except (TypeError, ValueError):
        return False
    return True


ANY = a("anything", lambda _value: True)
TEXT = a("a text", lambda value: isinstance(value, str))
INTEGER = a("an integer", lambda value: type(value) is int)
COUNT = a("a number from 0 on", lambda value: type(value) is int and value >= 0)
NUMBER = a("a number", lambda value: isinstance(value, (int, float)))
SHAPE = a("a shape", _is_shape)


def maybe(kind: Kind) -> Kind:
    """That, or None."""
    return Kind(kind.name, lambda value: None if value is None else kind.fault(value))


def either(*kinds: Kind) -> Kind:
    """One of several; the fault is that of the one that is right at the top."""
    name = " or ".join(kind.name for kind in kinds)

    def fault(value: Any) -> Fault | None:
        faults = [kind.fault(value) for kind in kinds]
        if not all(faults):
            return None
        within = next((found for found in faults if found and found[0]), None)
        return within or ("", f"is {shown(value)}, where {name} is expected")

    return Kind(name, fault)


def sequence(item: Kind = ANY) -> Kind:
    """A list or tuple, and each of its items."""
    of = a("a list", lambda value: isinstance(value, (list, tuple)))

    def fault(value: Any) -> Fault | None:
        if item is ANY or not isinstance(value, (list, tuple)):
            return of.fault(value)
        return _first((f"[{at}]", item.fault(each)) for at, each in _once(enumerate(value)))

    return Kind("a list", fault)


def mapping(key: Kind = ANY, item: Kind = ANY) -> Kind:
    """A dict, each of its keys, and each of its values."""
    of = a("a dict", lambda value: isinstance(value, dict))

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return of.fault(value)
        for each in value if key is not ANY else ():
            if key.fault(each):
                return "", f"has {shown(each)} as a key, where {key.name} is expected"
        held = _once(value.items()) if item is not ANY else ()
        return _first((f"[{shown(at)}]", item.fault(each)) for at, each in held)

    return Kind("a dict", fault)


def fields(**known: Kind) -> Kind:
    """A dict that has some of these keys; others may hold anything."""
    of = mapping()

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return of.fault(value)
        held = ((name, kind) for name, kind in known.items() if name in value)
        return _first((f".{name}", kind.fault(value[name])) for name, kind in held)

    return Kind("a dict", fault)


def record(**known: Kind) -> Kind:
    """A dict that has all of these keys."""
    some = fields(**known)

    def fault(value: Any) -> Fault | None:
        lacking = [name for name in known if isinstance(value, dict) and name not in value]
        return ("", f"has no {lacking[0]!r}") if lacking else some.fault(value)

    return Kind("a dict", fault)


def row(*items: Kind) -> Kind:
    """A list or tuple of so many, each of its kind."""
    of = a(
        f"a list of {len(items)}", lambda v: sequence().fault(v) is None and len(v) == len(items)
    )

    def fault(value: Any) -> Fault | None:
        held = zip(items, value, strict=True) if of.fault(value) is None else ()
        return of.fault(value) or _first(
            (f"[{at}]", kind.fault(item)) for at, (kind, item) in enumerate(held)
        )

    return Kind(of.name, fault)


def _once(parts: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Parts with their places; a pickle may have one container in very many of them."""
    seen: set[int] = set()
    for at, part in parts:
        if not isinstance(part, (dict, list, tuple)):
            yield at, part
        elif id(part) not in seen:
            seen.add(id(part))
            yield at, part


def _first(parts: Iterable[tuple[str, Fault | None]]) -> Fault | None:
    """The first fault of a value's parts, and where that part stands."""
    return next(((at + fault[0], fault[1]) for at, fault in parts if fault), None)
