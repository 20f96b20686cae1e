"""Compare the counters and rates of a run: a part that was saved at another step differs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from reshard.core.manifest import Manifest, TrainState
from reshard.units import counted

_LIGHTNING_TAG = "checkpoint"
_NAMED_STEP = re.compile(r"(?:global_step|checkpoint-|iter_)(\d+)")


def find_counter_conflicts(manifest: Manifest) -> list[str]:
    """Return a sentence for each counter, or learning rate, that does not fit the rest of the run.

    These are warnings, because a script can have its own way to count: it may skip updates, train a
    part of the model later than the rest, step its scheduler once an epoch, or set a rate itself.
    """
    train = manifest.train
    problems = _find_rate_conflicts(train)
    expected = train.updates
    if expected is None:
        return problems
    applied = max(train.optimizer_step.values(), default=None)
    if _is_of_fabric(manifest):
        applied = None
    if applied is not None and not _fits(train, applied, expected):
        problems.append(
            f"the optimizer was updated {applied:g} time{'s' * (applied != 1)}, but the run counts"
            f" {counted(expected, 'update')}"
        )
    named = _NAMED_STEP.fullmatch(PurePath(manifest.origin.path).name)
    if named and int(named[1]) != train.step:
        name = named[0]
        problems.append(f"the directory is named {name}, but its files state step {train.step}")
    scheduled = train.scheduler.get("last_epoch") if isinstance(train.scheduler, Mapping) else None
    # HF Trainer steps its scheduler once with each update (transformers 5.23 trainer.py).
    if train.trainer_state is not None and type(scheduled) is int and scheduled != expected:
        problems.append(
            f"the scheduler has made {scheduled} steps, but the run counts {expected} updates"
        )
    return problems


def _find_rate_conflicts(train: TrainState) -> list[str]:
    # Each step of a scheduler of torch copies the rates of the groups to ``_last_lr``, and its
    # creation the first ones (torch 2.13 ``optim/lr_scheduler.py``). Several schedulers may change
    # the same groups in turn.
    states = train.scheduler if isinstance(train.scheduler, list) else [train.scheduler]
    if len(states) != 1 or not isinstance(states[0], Mapping):
        return []
    problems = []
    for which, key, own_key in (("last", "_last_lr", "lr"), ("first", "base_lrs", "initial_lr")):
        rates = states[0].get(key)
        held = [group.hyper[own_key] for group in train.param_groups if own_key in group.hyper]
        if not isinstance(rates, list) or not all(isinstance(r, float) for r in [*rates, *held]):
            continue
        other = next((rate for rate in rates if held and rate not in held), None)
        if other is not None:
            own = ", ".join(f"{rate:g}" for rate in dict.fromkeys(held))
            problems.append(
                f"the {which} learning rate of the scheduler is {other:g}, but the optimizer's is"
                f" {own}: one of the two may be of another step or run"
            )
    return problems


def _is_of_fabric(manifest: Manifest) -> bool:
    # Fabric (2.6.6 ``fabric/wrappers.py``, ``fabric/strategies/deepspeed.py``) calls ``step`` of
    # the optimizer, so that the engine counts neither updates nor samples, and always saves under
    # the tag ``checkpoint``. So does Lightning's Trainer, which calls the engine and adds its
    # version.
    train = manifest.train
    is_tagged = PurePath(manifest.origin.path).name == _LIGHTNING_TAG
    return (
        (train.step, train.samples) == (0, 0)
        and is_tagged
        and "pytorch-lightning_version" not in train.client
    )


def _fits(train: TrainState, applied: float, expected: int) -> bool:
    if applied - expected in train.updates_at_start:
        return True
    # Which param groups are of one optimizer is not known.
    counts = [
        max((train.optimizer_step.get(fqn, 0) for fqn in group.fqns), default=0)
        for group in train.param_groups
    ]
    return train.sums_optimizers and applied <= expected <= sum(counts)
