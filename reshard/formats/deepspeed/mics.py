"""MiCS (DeepSpeed 0.9.2 to 0.17): the ranks of a group share every parameter.

Only the first group saves; the others have the same values.
"""

from __future__ import annotations

from reshard.core import counts
from reshard.formats.deepspeed.flat_order import get_zero_section
from reshard.formats.deepspeed.states import ModelStates


def count_savers(first: ModelStates, world_size: int) -> int:
    """Return the number of ranks that save: those of a group, or all ranks without MiCS."""
    size = get_zero_section(first.config).get("mics_shard_size")
    if type(size) is not int or size <= 0:  # -1: off
        return world_size
    return counts.check_count(first.file.path, "mics_shard_size", size)
