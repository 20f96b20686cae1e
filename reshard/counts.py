"""Checks of numbers that a file states: ranks, layers, indices.

They keep a checkpoint of a few bytes from causing a trillion operations.
"""

from __future__ import annotations

from typing import Any

from reshard.errors import ALTERED, CorruptError, shown

MOST = 1 << 20  # upper bound of ranks, layers and experts
_MOST_ELEMENTS = 1 << 63
_MOST_DIGITS = 9  # digits of an index


def count(where: object, what: str, value: Any, *, default: int | None = None) -> int:
    """Return a number of at least 1; ``default`` if the file has None or 0 in its place.

    Raises:
        CorruptError: the value is not a number, or out of range.
    """
    if default is not None and (value is None or value == 0):
        return default
    if type(value) is not int or not 1 <= value <= MOST:
        raise CorruptError(
            where,
            f"states {shown(value)} for {what}; expected a number from 1 to {MOST}",
            ALTERED,
        )
    return value


def elements(where: object, what: str, value: Any) -> int:
    """Return a number of elements, at least 0.

    Raises:
        CorruptError: the value is not such a number.
    """
    if type(value) is not int or not 0 <= value < _MOST_ELEMENTS:
        raise CorruptError(
            where,
            f"states that {what} has {shown(value)} elements; expected a number of at least 0",
        )
    return value


def natural(text: str) -> int | None:
    """Return the value of an index in a name or a document; None if the text is not an index.

    A text of more digits than an index has is not one: Python refuses to read thousands of digits.

    >>> natural("007"), natural("-1"), natural("9" * 5000)
    (7, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
