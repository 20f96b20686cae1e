"""Layers of a model, joined to a few groups that a chart can show."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(.*?\.|)(\d+)(?:\..*|$)")
MOST_GROUPS = 12


def group_layers(names: Iterable[str], most: int = MOST_GROUPS) -> dict[str, str]:
    """Return the group of each weight: its layer, several layers, or its module.

    >>> group_layers(["m.layers.0.w", "m.layers.1.w", "m.layers.2.w", "head.weight"], most=2)
    {'m.layers.0.w': 'm.layers.0-1', 'm.layers.1.w': 'm.layers.0-1', 'm.layers.2.w': 'm.layers.2', \
'head.weight': 'head'}
    """
    names = list(names)
    found = {name: _LAYER.fullmatch(name) for name in names}
    others = {name: _find_module(name) for name in names if not found[name]}
    if len(set(others.values())) > most:
        others = dict.fromkeys(others, "others")
    layers: dict[str, set[int]] = {}
    for match in found.values():
        if match:
            layers.setdefault(match[1], set()).add(int(match[2]))
    ranges = {stack: _join(sorted(numbers), most) for stack, numbers in layers.items()}
    return {
        name: f"{match[1]}{ranges[match[1]][int(match[2])]}"
        if (match := found[name])
        else others[name]
        for name in names
    }


def _find_module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _join(numbers: list[int], most: int) -> dict[int, str]:
    """Return the range of layers that each layer belongs to."""
    size = -(-len(numbers) // most)
    ranges: dict[int, str] = {}
    for start in range(0, len(numbers), size):
        part = numbers[start : start + size]
        text = str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        ranges |= dict.fromkeys(part, text)
    return ranges
