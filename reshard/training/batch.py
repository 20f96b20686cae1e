"""The batch arithmetic of another number of ranks: micro batch x accumulation x ranks is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from reshard.manifest import Manifest
from reshard.model_parallel.sizes import parse_mesh
from reshard.training import trainer_run
from reshard.training.trainer_run import Run
from reshard.units import counted, either, nearest_divisors

BATCH = "train_batch_size"  # of one rank, in HF Trainer's trainer_state.json
# The file that reshard writes beside trainer_state.json at another size: the run's own number of
# ranks and batch of a rank. The Trainer saves no accumulation, so the way back needs them.
BATCH_BEFORE = "reshard_batch.json"
WORLD = "world_size"
_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


class Rebalanced(NamedTuple):
    """The run with another accumulation, and notes about it for the user."""

    manifest: Manifest
    derived: list[str]
    warnings: list[str]


def rebalanced(manifest: Manifest, world_size: int) -> Rebalanced:
    """Return the run with the accumulation that keeps the global batch, and what to say.

    DeepSpeed keeps its configuration in the checkpoint (``ds_config``), HF Trainer no more than the
    batch of a rank (``trainer_state.json``), and our trainer derives the accumulation from the
    global batch when it resumes; for others the rule is said.
    """
    config, origin = manifest.train.config, manifest.origin
    before = origin.world // parse_mesh(origin.mesh).model
    run = trainer_run.read(manifest.train.trainer_state, origin.path)
    if run is not None and (problem := _problem_of_our_trainer(run, world_size)):
        return Rebalanced(manifest, [], [problem])
    if before == world_size:
        return Rebalanced(manifest, [], [])
    if isinstance(config, dict) and isinstance(config.get(_MICRO), int):
        return _of_deepspeed(manifest, config, before, world_size)
    if run is not None:
        return Rebalanced(manifest, [], [])
    progress = manifest.train.trainer_state
    if progress is not None and type(progress.get(BATCH)) is int:
        return _of_trainer(manifest, progress[BATCH], before, world_size)
    return Rebalanced(manifest, [_rule(before, world_size)], [])


def advice(total: int, micro: int, ranks: int) -> str:
    """Return what is wrong with a global batch, and which batches and ranks would do.

    >>> advice(12, 1, 5)  # doctest: +ELLIPSIS
    'a global batch of 12 is not divisible by 5 ranks x micro batch 1; use 10 or 15, or 2, 3, ...'
    >>> advice(7, 2, 2)
    'a global batch of 7 is not divisible by 2 ranks x micro batch 2; use 4 or 8'
    """
    unit = micro * ranks
    below = total // unit * unit
    ways = either([batch for batch in (below, below + unit) if batch])
    if total % micro == 0:
        sizes = nearest_divisors(total // micro, ranks)
        ways += f", or {either(sizes)} {'rank' if sizes == [1] else 'ranks'}"
    factors = f"{counted(ranks, 'rank')} x micro batch {micro}"
    return f"a global batch of {total} is not divisible by {factors}; use {ways}"


def _rule(before: int, ranks: int) -> str:
    """Return how to keep the global batch where nothing says what it is."""
    changed = f"{before} ranks become {ranks}"
    if before % ranks == 0:
        times = f"multiply the accumulation steps by {before // ranks}"
        return f"{changed}: {times} to keep the global batch"
    return (
        f"{changed}: to keep the global batch, set the accumulation steps to the global batch / "
        f"({ranks} ranks x micro batch); a global batch that this does not divide has to change"
    )


def _problem_of_our_trainer(run: Run, ranks: int) -> str:
    """Return why a resume on so many data-parallel ranks would refuse the run's global batch."""
    total, micro = (int(run.settings[name]) for name in ("global_batch", "micro_batch"))
    return advice(total, micro, ranks) if micro and total % (micro * ranks) else ""


def _of_deepspeed(
    manifest: Manifest, config: dict[str, Any], before: int, world_size: int
) -> Rebalanced:
    micro, steps = config[_MICRO], int(config.get(_STEPS, 1))
    total = micro * steps * before
    smaller = _micro(micro, total, world_size)
    warnings = []
    if smaller is None:
        new = max(1, round(total / (micro * world_size)))
        reached, smaller = micro * world_size * new, micro
        held = f"the configuration written has a global batch of {reached}"
        warnings = [f"{advice(total, micro, world_size)}; {held}"]
    else:
        new, reached = total // (smaller * world_size), total
    changed = {**config, _MICRO: smaller, _STEPS: new, _TOTAL: reached}
    pairs = ((_MICRO, micro, smaller), (_STEPS, steps, new))
    said = ", ".join(f"{name} {old} -> {now}" for name, old, now in pairs if old != now)
    ends = "" if warnings else f": the global batch stays {total}"
    manifest = _with_progress(_configured(manifest, changed), smaller)
    return Rebalanced(manifest, [f"{said}{ends}"] if said else [], warnings)


def _of_trainer(manifest: Manifest, micro: int, before: int, world_size: int) -> Rebalanced:
    """Return notes about our trainer's accumulation, which is an argument of the run alone."""
    own = manifest.train.opaque.get(BATCH_BEFORE, {WORLD: before, BATCH: micro})
    if own[WORLD] == world_size:
        text = f"{BATCH} {micro} -> {own[BATCH]}, which the run had at {world_size} ranks"
        return Rebalanced(_recorded(_with_progress(manifest, own[BATCH]), None), [text], [])
    manifest = _recorded(manifest, own)
    smaller = _micro(micro, micro * before, world_size)
    if smaller is None:
        return Rebalanced(manifest, [_rule(before, world_size)], [])
    factor = micro * before // (smaller * world_size)
    said = [f"per_device_train_batch_size {micro} -> {smaller}"] if smaller < micro else []
    said += [f"multiply {_STEPS} by {factor}"] if factor > 1 else []
    derived = [", ".join(said) + ": the global batch stays"]
    return Rebalanced(_with_progress(manifest, smaller), derived, [])


def _micro(most: int, total: int, ranks: int) -> int | None:
    """Return the largest batch of a rank, up to ``most``, of which whole steps make the total."""
    return next((n for n in range(most, 0, -1) if total % (n * ranks) == 0), None)


def _recorded(manifest: Manifest, own: Any) -> Manifest:
    """Record the run's own size and batch for the way back, or drop them there."""
    held = {key: value for key, value in manifest.train.opaque.items() if key != BATCH_BEFORE}
    kept = {**held, BATCH_BEFORE: own} if own else held
    return replace(manifest, train=replace(manifest.train, opaque=kept))


def _configured(manifest: Manifest, config: dict[str, Any]) -> Manifest:
    return replace(manifest, train=replace(manifest.train, config=config))


def _with_progress(manifest: Manifest, micro: int) -> Manifest:
    """Return HF Trainer's account, where there is one, with another batch of a rank."""
    train = manifest.train
    if train.trainer_state is None or trainer_run.is_document(train.trainer_state):
        return manifest
    changed = {**train.trainer_state, BATCH: micro}
    return replace(manifest, train=replace(train, trainer_state=changed))
