"""Keep the global batch at another number of ranks: micro batch x accumulation x ranks.

The positions in the data that each rank saved fit no other number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.core.manifest import Manifest
from reshard.layouts.model_parallel.sizes import parse_mesh
from reshard.training import trainer_run
from reshard.training.trainer_run import TrainerRun
from reshard.units import counted, either, find_nearest_divisors, some

BATCH = "train_batch_size"  # of one rank, in HF Trainer's trainer_state.json
# The file that reshard writes beside trainer_state.json at another size: the run's own number of
# ranks and batch of a rank. The Trainer saves no accumulation, so the way back needs them.
BATCH_BEFORE = "reshard_batch.json"
WORLD = "world_size"
# Keys of DeepSpeed's configuration; the first one is that of all ranks.
_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_DATA_PARALLEL = "data_parallel_size"  # beside sequence_parallel_size, if DeepSpeed makes the mesh


class Rebalanced(NamedTuple):
    """The run with another accumulation, and notes about it for the user."""

    manifest: Manifest
    derived: list[str]
    warnings: list[str]


def rebalance_batch(manifest: Manifest, world_size: int) -> Rebalanced:
    """Return the run with the accumulation that keeps the global batch, and notes on it.

    DeepSpeed saves its configuration in the checkpoint (``ds_config``), and HF Trainer only the
    batch of a rank (``trainer_state.json``). Our trainer derives the accumulation from the global
    batch when it resumes. For others the note states the rule.
    """
    config, origin = manifest.train.config, manifest.origin
    before = origin.world // parse_mesh(origin.mesh).model
    run = trainer_run.read(manifest.train.trainer_state, origin.path)
    if run is not None and (problem := _find_problem_of_our_trainer(run, world_size)):
        return Rebalanced(manifest, [], [problem])
    same = Rebalanced(manifest, [], [])
    if before == world_size:
        return same
    has_batch = isinstance(config, dict) and _states_batch(config)
    if run is not None:
        return _rebalance_our_trainer(manifest, run, world_size) if has_batch else same
    if has_batch:
        return _rebalance_sequences(manifest, config, before, world_size)
    progress = manifest.train.trainer_state
    if progress is not None and _is_count(progress.get(BATCH)):
        return _rebalance_hf_trainer(manifest, progress[BATCH], before, world_size)
    is_stated = origin.world == 1 or any(axis != "world" for axis in origin.mesh)
    return Rebalanced(manifest, [_describe_rule(before, world_size, is_stated=is_stated)], [])


def _states_batch(config: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration has numbers, where a user's may have "auto"."""
    return _is_count(config.get(_MICRO)) and _is_count(config.get(_STEPS, 1))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def describe_misfit(total: int, micro: int, ranks: int) -> str:
    """Describe why a global batch does not fit, and which batches and numbers of ranks do.

    >>> describe_misfit(12, 1, 5)  # doctest: +ELLIPSIS
    'a global batch of 12 is not divisible by 5 ranks x micro batch 1; use 10 or 15, or 2, 3, ...'
    >>> describe_misfit(7, 2, 2)
    'a global batch of 7 is not divisible by 2 ranks x micro batch 2; use 4 or 8'
    """
    unit = micro * ranks
    below = total // unit * unit
    ways = either([batch for batch in (below, below + unit) if batch])
    if total % micro == 0:
        sizes = find_nearest_divisors(total // micro, ranks)
        ways += f", or {either(sizes)} {'rank' if sizes == [1] else 'ranks'}"
    factors = f"{counted(ranks, 'rank')} x micro batch {micro}"
    return f"a global batch of {total} is not divisible by {factors}; use {ways}"


def _describe_rule(before: int, ranks: int, *, is_stated: bool = True) -> str:
    """Describe how to keep the global batch if no file states it.

    Args:
        is_stated: whether the files state the mesh, without which tensor-parallel ranks count as
            data-parallel ones.
    """
    if not is_stated:
        return (
            f"the number of ranks changes from {before} to {ranks}; to keep the global batch, keep"
            " data-parallel ranks x micro batch x accumulation steps (all ranks are data-parallel,"
            " unless the run has tensor, pipeline or context parallelism)"
        )
    changed = f"the data-parallel size changes from {before} to {ranks}"
    if before % ranks == 0:
        times = f"multiply the accumulation steps by {before // ranks}"
        return f"{changed}; to keep the global batch, {times}"
    factors = f"({counted(ranks, 'rank')} x micro batch)"
    return (
        f"{changed}; to keep the global batch, set the accumulation steps to global batch /"
        f" {factors}. If that is not an integer, change the micro batch or the global batch"
    )


def _find_problem_of_our_trainer(run: TrainerRun, ranks: int) -> str:
    """Return why the trainer would refuse to resume on so many data-parallel ranks, else "".

    With its canonical reduction, some ranks may have no micro batch in the last round of a step.
    """
    if run.settings.get("reduction") == "canonical":
        ranks = 1
    total, micro = (int(run.settings[name]) for name in ("global_batch", "micro_batch"))
    return describe_misfit(total, micro, ranks) if micro and total % (micro * ranks) else ""


def _rebalance_our_trainer(manifest: Manifest, run: TrainerRun, world_size: int) -> Rebalanced:
    """Return the run with DeepSpeed's configuration as the trainer itself would write it."""
    total, micro = (run.settings[name] for name in ("global_batch", "micro_batch"))
    config = manifest.train.config
    before, steps = config.get(_STEPS, 1), -(-total // (max(1, micro) * world_size))
    changed = {**config, _MICRO: micro, _STEPS: steps, _TOTAL: total}
    note = f"{_STEPS} {before} -> {steps}: the global batch stays {total}"
    train = replace(manifest.train, config=changed)
    return Rebalanced(replace(manifest, train=train), [note] if steps != before else [], [])


def _rebalance_sequences(
    manifest: Manifest, config: dict[str, Any], before: int, world_size: int
) -> Rebalanced:
    """Return the run with DeepSpeed's configuration for the ranks that have sequences of their own.

    Sequence-parallel ranks (Ulysses) share their sequences. ZeRO partitions the optimizer over them
    too, but the global batch does not count them (DeepSpeed 0.19.8, runtime/config.py: world_size).
    """
    size = _find_sequence_parallel_size(config, before)
    if world_size % size:
        warning = (
            f"ds_config: {_TOTAL} {config[_TOTAL]} of {counted(before, 'rank')} means that {size}"
            f" ranks share each sequence, and {counted(world_size, 'rank')} cannot be divided by"
            f" {size}; set the batch and the sequence parallelism"
        )
        return Rebalanced(manifest, [], [warning])
    return _rebalance_deepspeed(manifest, config, before // size, world_size // size)


def _find_sequence_parallel_size(config: dict[str, Any], ranks: int) -> int:
    """Return how many ranks share a sequence, from the global batch that the configuration states.

    >>> _find_sequence_parallel_size({_TOTAL: 8, _MICRO: 2, _STEPS: 2}, 4)
    2
    """
    total = config.get(_TOTAL)
    if type(total) is not int or total < 1:
        return 1
    size, rest = divmod(config[_MICRO] * config.get(_STEPS, 1) * ranks, total)
    return 1 if rest or size < 1 or ranks % size else size


def _rebalance_deepspeed(
    manifest: Manifest, config: dict[str, Any], before: int, world_size: int
) -> Rebalanced:
    """Return the run with another micro batch and accumulation in DeepSpeed's configuration."""
    micro, steps = config[_MICRO], config.get(_STEPS, 1)
    total = micro * steps * before
    chosen = _choose_own_micro_batch(manifest, total, world_size)
    chosen = chosen or find_micro_batch(micro, total, world_size)
    warnings = []
    if chosen is None:
        # No micro batch divides the global batch: come as close to it as the accumulation can.
        new = max(1, round(total / (micro * world_size)))
        reached, chosen = micro * world_size * new, micro
        written = f"the configuration written has a global batch of {reached}"
        warnings = [f"{describe_misfit(total, micro, world_size)}; {written}"]
    else:
        new, reached = total // (chosen * world_size), total
    changed = {**config, _MICRO: chosen, _STEPS: new, _TOTAL: reached}
    if _DATA_PARALLEL in config:
        changed[_DATA_PARALLEL] = world_size
    pairs = ((_MICRO, micro, chosen), (_STEPS, steps, new))
    changes = ", ".join(f"{name} {old} -> {now}" for name, old, now in pairs if old != now)
    ending = "" if warnings else f": the global batch stays {total}"
    own = manifest.train.opaque.get(BATCH_BEFORE, {WORLD: before, BATCH: micro})
    # At the run's own number of ranks, the record is no longer needed.
    manifest = _record_own(manifest, None if own[WORLD] == world_size else own)
    train = replace(manifest.train, config=changed)
    manifest = _with_progress(replace(manifest, train=train), chosen)
    return Rebalanced(manifest, [f"{changes}{ending}"] if changes else [], warnings)


def _choose_own_micro_batch(manifest: Manifest, total: int, world_size: int) -> int | None:
    """Return the batch that the run itself had at this number of ranks, if it fits; else None."""
    own = manifest.train.opaque.get(BATCH_BEFORE)
    if own is None or own[WORLD] != world_size or total % (own[BATCH] * world_size):
        return None
    batch: int = own[BATCH]
    return batch


def _rebalance_hf_trainer(
    manifest: Manifest, micro: int, before: int, world_size: int
) -> Rebalanced:
    """Return the run with another batch of a rank, and a note on its accumulation.

    The accumulation is an argument of the program, so it can only be described.
    """
    own = manifest.train.opaque.get(BATCH_BEFORE, {WORLD: before, BATCH: micro})
    if own[WORLD] == world_size:
        text = f"{BATCH} {micro} -> {own[BATCH]}, which the run had at {world_size} ranks"
        return Rebalanced(_record_own(_with_progress(manifest, own[BATCH]), None), [text], [])
    manifest = _record_own(manifest, own)
    smaller = find_micro_batch(micro, micro * before, world_size)
    if smaller is None:
        return Rebalanced(manifest, [_describe_rule(before, world_size)], [])
    factor = micro * before // (smaller * world_size)
    changes = [f"per_device_train_batch_size {micro} -> {smaller}"] if smaller < micro else []
    changes += [f"multiply {_STEPS} by {factor}"] if factor > 1 else []
    derived = [", ".join(changes) + ": the global batch stays"]
    return Rebalanced(_with_progress(manifest, smaller), derived, [])


def find_micro_batch(most: int, total: int, ranks: int) -> int | None:
    """Return the largest batch of a rank, up to ``most``, of which whole steps make the total."""
    return next((n for n in range(most, 0, -1) if total % (n * ranks) == 0), None)


def _record_own(manifest: Manifest, own: Any) -> Manifest:
    """Return the run with a record of its own size and batch for the way back, or without one.

    Only HF Trainer's directory has a place for the record.
    """
    opaque = {key: value for key, value in manifest.train.opaque.items() if key != BATCH_BEFORE}
    progress = manifest.train.trainer_state
    if own and progress is not None and not trainer_run.is_document(progress):
        opaque[BATCH_BEFORE] = own
    return replace(manifest, train=replace(manifest.train, opaque=opaque))


def _with_progress(manifest: Manifest, micro: int) -> Manifest:
    """Return the run with another batch of a rank in HF Trainer's state, if there is one."""
    train = manifest.train
    if train.trainer_state is None or trainer_run.is_document(train.trainer_state):
        return manifest
    changed = {**train.trainer_state, BATCH: micro}
    return replace(manifest, train=replace(train, trainer_state=changed))


# torchtitan 0.3 ``components/dataloader.py`` (``ParallelAwareDataloader.state_dict``): a key
# ``dp_rank_N`` for each data-parallel rank.
_OF_RANK = re.compile(r"(?:dp_?)?rank[-_]?\d+")


def describe_positions(manifest: Manifest, ranks: int) -> Iterator[str]:
    """Yield a warning for each value of the run that has a part for each of its own ranks.

    Args:
        ranks: number of ranks of the output; nothing is yielded if the source has as many.
    """
    if manifest.origin.world == ranks:
        return
    for name, value in manifest.train.client.items():
        parts = [str(key) for key in value] if isinstance(value, Mapping) else []
        parts = [key for key in parts if _OF_RANK.fullmatch(key)]
        if parts:
            yield (
                f"{name} has a state for each of {counted(len(parts), 'rank')} ({some(parts)}),"
                f" which fit no other number: a run of {counted(ranks, 'rank')} has to start its"
                " data loader anew (torchtitan: exclude_from_loading), and repeats or skips samples"
            )
