"""How large a value is once everything that it shares is written out.

A pickle refers to what it has made before: a hundred bytes of it hold a tuple twice in a tuple
twice in ..., whose text would have a billion letters, and a list of one dict ten thousand times is
ten thousand dicts to whoever copies them. Comparing, printing or copying such a value takes as long
as it is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.pickles.values import Call

_MOST = 1 << 23  # values, and
_EACH = 8  # for every byte of the pickle
_FEW = 16

HOLDERS = frozenset((dict, list, tuple, set, frozenset))


def is_worth_a_look(value: Any) -> bool:
    """Whether a value that gets one more place may grow so: not the shapes that tensors share."""
    if type(value) is not tuple:
        return type(value) in HOLDERS
    return len(value) > _FEW or any(type(part) in HOLDERS for part in value)


def is_too_large(root: Any, nbytes: int) -> bool:
    """Whether some container stands for more values than a pickle of so many bytes should.

    A described object is one value, whoever shares it; what is in it counts by itself.
    """
    most = _MOST + _EACH * nbytes
    sizes: dict[int, int] = {}  # 0 while a container is open: one within itself ends there
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        value, is_closed = waiting.pop()
        if id(value) in sizes and not is_closed:
            continue
        parts = _parts(value)
        if is_closed:
            size = 1 + sum(1 if type(part) is Call else sizes.get(id(part), 1) for part in parts)
            if size > most:
                return True
            sizes[id(value)] = size
        elif parts:
            sizes[id(value)] = 0
            waiting.append((value, True))
            held = (part for part in parts if type(part) in HOLDERS or type(part) is Call)
            waiting += [(part, False) for part in held]
    return False


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value.values(), *(key for key in value if type(key) is Call)]
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, Call):
        return [value.args, value.state, value.items, value.elements]
    return value if isinstance(value, (list, tuple)) else ()
