"""Compute the size of a value when everything that it shares is written out.

A pickle refers to earlier values: with a hundred bytes it can contain a tuple twice in a tuple
twice in ..., whose text would have a billion letters, and a list with one dict ten thousand times
becomes ten thousand dicts when it is copied. The time to compare, print or copy a value grows with
this size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.containers.pickles.values import Call, DictObject, ListObject

_MOST = 1 << 23  # values that any pickle may expand to
_EACH = 8  # further values for every byte of the pickle
_FEW = 16

HOLDERS = frozenset((dict, list, tuple, set, frozenset, DictObject, ListObject))


def may_grow(value: Any) -> bool:
    """Return whether repeated references to a value may make it large; shapes of tensors do not."""
    if type(value) is not tuple:
        return type(value) in HOLDERS
    return len(value) > _FEW or any(type(part) in HOLDERS for part in value)


def is_too_large(root: Any, nbytes: int) -> bool:
    """Return whether a container expands to more values than a pickle of ``nbytes`` should.

    A described object counts as one value wherever it is referenced; its content counts by itself.
    """
    most = _MOST + _EACH * nbytes
    sizes: dict[int, int] = {}  # 0 while a container is open, which ends a cycle
    # A stack instead of recursion, because a value can be nested deeper than Python recurses.
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        value, is_closed = waiting.pop()
        if id(value) in sizes and not is_closed:
            continue
        parts = _list_parts(value)
        if is_closed:
            size = 1 + sum(1 if type(part) is Call else sizes.get(id(part), 1) for part in parts)
            if size > most:
                return True
            sizes[id(value)] = size
        elif parts:
            sizes[id(value)] = 0
            waiting.append((value, True))
            nested = (part for part in parts if type(part) in HOLDERS or type(part) is Call)
            waiting += [(part, False) for part in nested]
    return False


def _list_parts(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value.values(), *(key for key in value if type(key) is Call)]
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, Call):
        return [value.args, value.state, value.items, value.elements]
    return value if isinstance(value, (list, tuple)) else ()
