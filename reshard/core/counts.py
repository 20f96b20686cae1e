"""Checks of numbers that a file states: ranks, layers, elements, indices.

Without an upper bound, a checkpoint of a few bytes could cause a trillion operations.
"""

from __future__ import annotations

from typing import Any

from reshard.errors import ALTERED, CorruptError, shown

MOST = 1 << 20  # upper bound of ranks, layers and experts
_MOST_ELEMENTS = 1 << 63
_MOST_DIGITS = 9  # digits of an index


def check_count(where: object, what: str, value: Any, *, default: int | None = None) -> int:
    """Return a value if it is a number of at least 1.

    Args:
        what: the thing that is counted, for the message.
        default: the number to return in place of None or 0; None accepts neither.

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


def check_numel(where: object, what: str, value: Any) -> int:
    """Return a value if it is a number of elements, at least 0.

    Raises:
        CorruptError: the value is not such a number.
    """
    if type(value) is not int or not 0 <= value < _MOST_ELEMENTS:
        raise CorruptError(
            where,
            f"states that {what} has {shown(value)} elements; expected a number of at least 0",
        )
    return value


def parse_index(text: str) -> int | None:
    """Return the value of an index in a name or a document; None if the text is not an index.

    A text of more than nine digits is not an index. (Python raises an error for more than 4300.)

    >>> parse_index("007"), parse_index("-1"), parse_index("9" * 5000)
    (7, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
