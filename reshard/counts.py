"""Numbers that a file states, of ranks, layers or a place in a list, held to what can be.

A checkpoint of a few bytes must not make anything be done a trillion times.
"""

from __future__ import annotations

from typing import Any

from reshard.errors import CorruptError, shown

MOST = 1 << 20  # no run has more ranks, no model more layers or experts
_MOST_ELEMENTS = 1 << 63
_MOST_DIGITS = 9  # of an index


def count(where: object, what: str, value: Any, *, default: int | None = None) -> int:
    """A number from 1 on; ``default`` where the file has None, or 0 for the same.

    Raises:
        CorruptError: it is no number, or one that cannot be.
    """
    if default is not None and (value is None or value == 0):
        return default
    if type(value) is not int or not 1 <= value <= MOST:
        raise CorruptError(
            where,
            f"says that {what} is {shown(value)}; a number from 1 to {MOST} is expected",
            "the file was altered: fetch it again",
        )
    return value


def elements(where: object, what: str, value: Any) -> int:
    """A number of elements, from 0 on.

    Raises:
        CorruptError: it is none.
    """
    if type(value) is not int or not 0 <= value < _MOST_ELEMENTS:
        raise CorruptError(where, f"says that {what} has {shown(value)} elements")
    return value


def natural(text: str) -> int | None:
    """The number that an index in a name or in a document is, from zero on; None for other texts.

    More digits than an index has are another text: Python refuses to read thousands of them.

    >>> natural("007"), natural("-1"), natural("9" * 5000)
    (7, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
