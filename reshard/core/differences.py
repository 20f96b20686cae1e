"""Where two nested values of files differ, so that a message can show that and not a whole dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import eq
from typing import Any

from reshard.errors import shown


def list_unequal(
    a: Any, b: Any, same: Callable[[Any, Any], bool] = eq, path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, other value) of what differs inside of two values that are unequal.

    Lists of unequal length are not compared further.

    >>> list(list_unequal({"lr": [1, 2], "x": 0}, {"lr": [1, 3], "x": 0}))
    [('.lr[1]', 2, 3)]
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        one, two = ({str(key): item for key, item in side.items()} for side in (a, b))
        pairs = [(f"{path}.{key}", one.get(key), two.get(key)) for key in {**one, **two}]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = [(f"{path}[{at}]", *items) for at, items in enumerate(zip(a, b, strict=True))]
    else:
        yield path, a, b
        return
    for inner, left, right in pairs:
        if not same(left, right):
            yield from list_unequal(left, right, same, inner)


def describe_first(what: str, value: Any, other: Any, where: str) -> str:
    """Return a sentence about the first difference inside of two unequal values.

    Args:
        where: the name of the file that has the other value.

    >>> describe_first("the shapes", {"w": [2, 3]}, {"w": [2, 4]}, "rank0.pt")
    'the shapes.w[1] is 3, but 4 in rank0.pt'
    """
    path, left, right = next(list_unequal(value, other), ("", value, other))
    lists = isinstance(left, (list, tuple)) and isinstance(right, (list, tuple))
    if lists and len(left) != len(right):
        return f"{what}{path} has {len(left)} values, but {len(right)} in {where}"
    return f"{what}{path} is {shown(left)}, but {shown(right)} in {where}"
