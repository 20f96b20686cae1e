"""Which ranks hold which experts: readers and targets share it.

Source: DeepSpeed 0.19.8 ``utils/groups.py`` (``_create_expert_and_data_parallel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def owners(world: int, size: int, config: Mapping[str, Any]) -> list[range]:
    """Of each expert-parallel rank, the ranks that hold its experts, in order of their partitions.

    Expert-parallel ranks are neighbours, unless ``use_data_before_expert_parallelism``.

    >>> owners(4, 2, {})
    [range(0, 4, 2), range(1, 4, 2)]
    >>> owners(4, 2, {"use_data_before_expert_parallelism": True})
    [range(0, 2), range(2, 4)]
    """
    each = world // size
    if config.get("use_data_before_expert_parallelism"):
        return [range(at * each, (at + 1) * each) for at in range(size)]
    return [range(at, world, size) for at in range(size)]


def place(world: int, size: int, config: Mapping[str, Any], rank: int) -> tuple[int, int]:
    """A rank's expert-parallel rank, and its place among those that hold the same experts.

    >>> place(4, 2, {}, 3)
    (1, 1)
    """
    for number, ranks in enumerate(owners(world, size, config)):
        if rank in ranks:
            return number, ranks.index(rank)
    raise ValueError(f"rank {rank} of {world}")
