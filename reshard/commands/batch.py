"""The batch arithmetic of another number of ranks: micro batch x accumulation x ranks is kept."""

from __future__ import annotations

from typing import Any

from reshard.manifest import Manifest

_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_UNKNOWN = (
    "{0} ranks become {1}: multiply the accumulation steps by {0}/{1} to keep the global batch"
)
_CHANGED = "no accumulation keeps the global batch of {} at {} ranks: it becomes {}"


def rebalanced(manifest: Manifest, world_size: int) -> tuple[Any, list[str]]:
    """The run's configuration with the accumulation that keeps the global batch, and what to say.

    Only DeepSpeed keeps its configuration in the checkpoint (``ds_config``); for others the rule is
    said.
    """
    config, before = manifest.train.config, int(manifest.origin.mesh.get("world", 1))
    if before == world_size:
        return config, []
    if not isinstance(config, dict) or not isinstance(config.get(_MICRO), int):
        return config, [_UNKNOWN.format(before, world_size)]
    micro, steps = config[_MICRO], int(config.get(_STEPS, 1))
    total = micro * steps * before
    for smaller in range(micro, 0, -1):
        if total % (smaller * world_size) == 0:
            new = total // (smaller * world_size)
            changed = {**config, _MICRO: smaller, _STEPS: new, _TOTAL: total}
            cut = f"{_MICRO} {micro} -> {smaller}, " if smaller < micro else ""
            return changed, [f"{cut}{_STEPS} {steps} -> {new}: the global batch stays {total}"]
    reached = micro * steps * world_size
    return {**config, _TOTAL: reached}, [_CHANGED.format(total, world_size, reached)]
