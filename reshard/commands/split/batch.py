"""The batch arithmetic of another number of ranks: micro batch x accumulation x ranks is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reshard.formats.pytorch.beside import BATCH, BATCH_BEFORE, WORLD
from reshard.manifest import Manifest
from reshard.model_parallel.sizes import of_mesh

_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_UNKNOWN = (
    "{0} ranks become {1}: multiply the accumulation steps by {0}/{1} to keep the global batch"
)
_CHANGED = "no accumulation keeps the global batch of {} at {} ranks: it becomes {}"


def rebalanced(manifest: Manifest, world_size: int) -> tuple[Manifest, list[str]]:
    """The run with the accumulation that keeps the global batch, and what to say.

    DeepSpeed keeps its configuration in the checkpoint (``ds_config``), HF Trainer no more than the
    batch of a rank (``trainer_state.json``); for others the rule is said.
    """
    config, origin = manifest.train.config, manifest.origin
    before = origin.world // of_mesh(origin.mesh).model
    if before == world_size:
        return manifest, []
    if isinstance(config, dict) and isinstance(config.get(_MICRO), int):
        return _of_deepspeed(manifest, config, before, world_size)
    progress = manifest.train.trainer_state
    if progress is not None and type(progress.get(BATCH)) is int:
        return _of_trainer(manifest, progress[BATCH], before, world_size)
    return manifest, [_UNKNOWN.format(before, world_size)]


def _of_deepspeed(
    manifest: Manifest, config: dict[str, Any], before: int, world_size: int
) -> tuple[Manifest, list[str]]:
    micro, steps = config[_MICRO], int(config.get(_STEPS, 1))
    total = micro * steps * before
    smaller = _micro(micro, total, world_size)
    if smaller is None:
        reached = micro * steps * world_size
        text = _CHANGED.format(total, world_size, reached)
        return _configured(manifest, {**config, _TOTAL: reached}), [text]
    new = total // (smaller * world_size)
    changed = {**config, _MICRO: smaller, _STEPS: new, _TOTAL: total}
    pairs = ((_MICRO, micro, smaller), (_STEPS, steps, new))
    said = ", ".join(f"{name} {old} -> {now}" for name, old, now in pairs if old != now)
    manifest = _with_progress(_configured(manifest, changed), smaller)
    return manifest, [f"{said}: the global batch stays {total}"]


def _of_trainer(
    manifest: Manifest, micro: int, before: int, world_size: int
) -> tuple[Manifest, list[str]]:
    """Its accumulation is an argument of the run alone: what it must be multiplied by is said."""
    own = manifest.train.opaque.get(BATCH_BEFORE, {WORLD: before, BATCH: micro})
    if own[WORLD] == world_size:
        text = f"{BATCH} {micro} -> {own[BATCH]}, which the run had at {world_size} ranks"
        return _recorded(_with_progress(manifest, own[BATCH]), None), [text]
    manifest = _recorded(manifest, own)
    smaller = _micro(micro, micro * before, world_size)
    if smaller is None:
        return manifest, [_UNKNOWN.format(before, world_size)]
    factor = micro * before // (smaller * world_size)
    said = [f"per_device_train_batch_size {micro} -> {smaller}"] if smaller < micro else []
    said += [f"multiply {_STEPS} by {factor}"] if factor > 1 else []
    return _with_progress(manifest, smaller), [", ".join(said) + ": the global batch stays"]


def _micro(most: int, total: int, ranks: int) -> int | None:
    """The largest batch of a rank, no more than before, of which whole steps make the total."""
    return next((n for n in range(most, 0, -1) if total % (n * ranks) == 0), None)


def _recorded(manifest: Manifest, own: Any) -> Manifest:
    """Keep the run's own size and batch for the way back, or forget them there."""
    held = {key: value for key, value in manifest.train.opaque.items() if key != BATCH_BEFORE}
    kept = {**held, BATCH_BEFORE: own} if own else held
    return replace(manifest, train=replace(manifest.train, opaque=kept))


def _configured(manifest: Manifest, config: dict[str, Any]) -> Manifest:
    return replace(manifest, train=replace(manifest.train, config=config))


def _with_progress(manifest: Manifest, micro: int) -> Manifest:
    """HF Trainer's account, where there is one, with another batch of a rank."""
    train = manifest.train
    if train.trainer_state is None:
        return manifest
    changed = {**train.trainer_state, BATCH: micro}
    return replace(manifest, train=replace(train, trainer_state=changed))
