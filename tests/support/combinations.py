"""The choice of test cases among all combinations of several settings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

EVERY = "RESHARD_EVERY_COMBINATION"  # the environment variable that `--every-combination` sets
Combination = tuple[Any, ...]


def choose_combinations(
    combinations: Iterable[Combination], needed: Sequence[Combination] = ()
) -> list[Combination]:
    """Return combinations in which any two values that occur together in one still do.

    Defects that need three particular values at once are rare, and a full matrix of real frameworks
    takes minutes. ``--every-combination`` of pytest chooses all.

    Args:
        combinations: tuples of the same length, one value for each setting.
        needed: combinations that are always chosen.

    >>> choose_combinations(itertools.product("ab", "cd", "ef"))
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    every = list(combinations)
    if os.environ.get(EVERY):
        return every
    chosen = set(needed)
    covered = set().union(*map(_list_pairs, chosen))
    wanted = set().union(*map(_list_pairs, every))
    while covered < wanted:
        best = max(every, key=lambda combination: len(_list_pairs(combination) - covered))
        chosen.add(best)
        covered |= _list_pairs(best)
    return [combination for combination in every if combination in chosen]


def _list_pairs(combination: Combination) -> set[Any]:
    """Return every pair of two settings' values."""
    return set(itertools.combinations(enumerate(combination), 2))
