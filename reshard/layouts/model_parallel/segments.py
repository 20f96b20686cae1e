"""Rows of a fused parameter that are cut apart: their numbers follow from a run's arguments.

A rule lists the segments along dim 0 as products: ``mamba_num_groups*mamba_state_dim``. A word is
an argument of Megatron, or one of the numbers in the table's section ``numbers``, which lists the
ways to get it: the first whose words are all known counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from reshard.errors import CorruptError, UsageError
from reshard.layouts.model_parallel.shards import Split

_TOKEN = re.compile(r"([*/]?)\s*([a-z_]+|\d+)\s*")

Numbers = Mapping[str, Sequence[str]]


def make_split(
    segments: Mapping[str, str], numbers: Numbers, args: Mapping[str, Any], source: str
) -> Split:
    """Return the cut of a parameter whose segments are cut one by one.

    Raises:
        UsageError: the arguments do not state a number.
        CorruptError: numbers that no model has.
    """
    rows = [evaluate(text, numbers, args, source) for text in segments.values()]
    if min(rows) < 1:
        raise CorruptError(source, f"states segments of {rows} rows")
    unit = gcd(*rows)
    return Split(0, tuple(row // unit for row in rows), rows=sum(rows))


def evaluate(text: str, numbers: Numbers, args: Mapping[str, Any], source: str) -> int:
    """Return the value of a product of arguments.

    Raises:
        UsageError: the arguments do not state a number.
        CorruptError: it is no whole number.
    """
    value = _evaluate(text, numbers, args)
    if value is None:
        raise UsageError(
            source, f"does not state {text}, the number of rows of a segment of a fused parameter"
        )
    whole, rest = value
    if rest:
        raise CorruptError(source, f"states a {text} that is not a whole number")
    return whole


def _evaluate(text: str, numbers: Numbers, args: Mapping[str, Any]) -> tuple[int, int] | None:
    above, below = 1, 1
    for sign, word in _TOKEN.findall(text):
        number = int(word) if word.isdecimal() else _find(word, numbers, args)
        if number is None or number < 1:
            return None
        above, below = (above, below * number) if sign == "/" else (above * number, below)
    return divmod(above, below)


def _find(word: str, numbers: Numbers, args: Mapping[str, Any]) -> int | None:
    value = args.get(word)
    if type(value) is int:
        return value
    for text in numbers.get(word, ()):
        # The word itself is left out, so that numbers that refer to one another end.
        found = _evaluate(text, {k: v for k, v in numbers.items() if k != word}, args)
        if found is not None and not found[1]:
            return found[0]
    return None
