"""OptimizedLinear with ``base_weight_sharding``: each rank has a 1-d part of a frozen ``weight``.

The engine saves that of the first rank alone. Source: DeepSpeed 0.19.8
``linear/optimized_linear.py``.
"""

from __future__ import annotations

from math import prod

from reshard.core.manifest import Entry
from reshard.formats.deepspeed.states import ModelStates
from reshard.units import abridge

_LISTED = 4


def drop_base_shards(_first: ModelStates, entries: list[Entry], warnings: list[str]) -> list[Entry]:
    """Return the entries without weights of which the files hold one rank's part."""
    shapes = {entry.fqn: entry.shape for entry in entries}
    shards = []
    for fqn, shape in shapes.items():
        layer = fqn.removesuffix("weight")
        down, up = (shapes.get(f"{layer}lora_weight_{n}.weight", ()) for n in (1, 2))
        # ``lora_weight_1`` is (LoRA rank, in), ``lora_weight_2`` (out, LoRA rank); the whole base
        # weight has out x in elements.
        if len(shape) == 1 and len(down) == len(up) == 2 and prod(shape) < up[0] * down[1]:
            shards.append(fqn)
    if shards:
        warnings.append(
            "DeepSpeed's base_weight_sharding (OptimizedLinear) shards frozen weights over the"
            f" ranks and saves the first rank's shard alone, so these are missing:"
            f" {abridge(shards, _LISTED)}"
        )
    return [entry for entry in entries if entry.fqn not in shards]
