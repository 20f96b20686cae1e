"""Build the state of a learning-rate schedule, and scale it to a run of other ranks.

Accelerate steps a prepared scheduler once per process and update (``AcceleratedScheduler.step``
with ``split_batches=False``, its default), so the counters and the lengths in a scheduler's state
are in units of updates times processes. A state that continues at another number of processes has
all of them multiplied by the same factor: the schedule stays the same function of the updates.

Sources: Accelerate 1.15 ``scheduler.py``; torch 2.13 ``optim/lr_scheduler.py``, whose
``load_state_dict`` takes lengths (``T_max``, ``step_size`` ...) from the state, not the script
(it sets every value as an attribute; ``LambdaLR`` needs ``lr_lambdas``); DeepSpeed 0.19.8
``runtime/lr_schedules.py`` (every ``load_state_dict`` reads ``last_batch_iteration``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import Tensor
from reshard.containers.torch_writer import AS_WRITTEN
from reshard.core.manifest import Manifest, TrainState
from reshard.training.copied_files import SCHEDULER

_COUNTER = "collections.Counter"  # of MultiStepLR's milestones
_INNER = "_schedulers"  # of SequentialLR and ChainedScheduler
_STEPS = "last_epoch"
_DEEPSPEEDS_STEPS = "last_batch_iteration"
_WHOLE = ("step_size", "total_iters", "patience")  # exact only if they stay whole numbers


def build_state(step: int, rates: Sequence[Any]) -> dict[str, Any]:
    """Return the state of a ``LambdaLR`` at a step, which torch's other schedulers load too.

    Without ``base_lrs`` in its state, a scheduler keeps those with which the new run creates it.

    Args:
        rates: the learning rate of each param group.
    """
    return {
        _STEPS: step,
        "_step_count": step + 1,
        "_last_lr": list(rates),
        "lr_lambdas": [None] * len(rates),  # torch stores None for a lambda that is a function
    }


def add_deepspeeds_counter(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a torch scheduler, with the counter that DeepSpeed's schedulers load."""
    return {**state, _DEEPSPEEDS_STEPS: state[_STEPS] - 1}  # DeepSpeed's begins at -1


def is_torchs(scheduler: Any) -> bool:
    """Return whether a scheduler of torch loads it."""
    return isinstance(scheduler, Mapping) and _STEPS in scheduler


def is_deepspeeds(scheduler: Any) -> bool:
    """Return whether only a scheduler of DeepSpeed loads it: one of torch would take no count."""
    is_counted = isinstance(scheduler, Mapping) and _DEEPSPEEDS_STEPS in scheduler
    return is_counted and not is_torchs(scheduler)


def count_steps_per_update(train: TrainState, processes: int) -> int | None:
    """Return how many steps the scheduler makes for one update of the optimizer.

    The optimizer's own count of updates is the evidence. One process cannot tell the two rules
    apart: there the answer is 1, whatever ``split_batches`` was.

    Returns:
        ``processes``, 1, or None where the counters agree with neither.
    """
    scheduler = train.scheduler
    steps = scheduler.get(_STEPS) if isinstance(scheduler, Mapping) else None
    updates = max(train.optimizer_step.values(), default=None)
    if type(steps) is not int or updates is None:
        return None
    return next((count for count in (processes, 1) if steps == count * updates), None)


def find_factor(manifest: Manifest, processes: int) -> Fraction:
    """Return the factor for Accelerate's scheduler states with another number of processes.

    The factor is 1 if the program does not step them once per process, or if the counters do not
    show whether it does.
    """
    before = manifest.origin.world
    if not manifest.train.kept_files:  # not Accelerate's
        return Fraction(1)
    counted = count_steps_per_update(manifest.train, before)
    return Fraction(processes, before) if counted == before else Fraction(1)


def scale_file(path: str, factor: Fraction) -> ScaledSchedule | None:
    """Return the scaled scheduler state of a file; None if it is not a torch scheduler's."""
    root = torch_reader.read(path, builders=AS_WRITTEN).root
    if not isinstance(root, dict) or _STEPS not in root or not _is_writable(root):
        return None
    return scale(root, factor)


def describe_changes(manifest: Manifest, processes: int) -> Iterator[str]:
    """Describe the changes to Accelerate's schedulers, and the settings that the program needs."""
    before, train = manifest.origin.world, manifest.train
    files = {name: path for name, path in train.kept_files.items() if SCHEDULER.fullmatch(name)}
    if before == processes or not files:
        return
    by = find_factor(manifest, processes)
    if by == 1:
        counted = count_steps_per_update(train, before)
        if counted is None:
            yield _UNCLEAR.format(", ".join(files), before)
        return
    for name, path in files.items():
        yield from _describe_file(name, scale_file(path, by), before, processes)
    yield _LENGTHS.format(processes, float(by))
    if before == 1:
        yield _SPLIT.format(", ".join(files))


_UNCLEAR = (
    "{}: copied as saved. Its counter fits neither one step per update nor one per process ({}):"
    " check the learning rate after the first update"
)
_LENGTHS = (
    "Accelerate steps the scheduler {} times per update now (once per process): lengths that the"
    " program passes to its scheduler (warmup steps, total steps) must be in the same unit."
    " num_training_steps * accelerator.num_processes does; multiply constants by {:g}"
)
_SPLIT = (
    "if the program sets split_batches=True or steps the scheduler itself, copy {} from the source:"
    " the checkpoint of one process does not show whether it does"
)


def _describe_file(
    name: str, scaled: ScaledSchedule | None, before: int, processes: int
) -> Iterator[str]:
    if scaled is None:
        yield (
            f"{name} is not a torch scheduler's state, or has tensors: copied as saved for"
            f" {before} processes"
        )
        return
    changes = ", ".join(scaled.changes)
    yield f"{name}: {changes} (counted for {processes} processes instead of {before})"
    for text in scaled.inexact:
        yield f"{name}: {text}; it is rounded up, and the learning rate changes at other updates"


def _is_writable(value: Any) -> bool:
    """Return whether a state has no tensors, which would have to be read from the source."""
    if isinstance(value, Mapping):
        return all(map(_is_writable, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_writable, value))
    return not isinstance(value, Tensor)


@dataclass(slots=True)
class ScaledSchedule:
    """A scheduler's state in new units.

    Args:
        state: the state in new units.
        changes: a text "name old -> new" for each changed number.
        inexact: a text for each whole number whose scaled value is not whole.
    """

    state: Any
    changes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)


def scale(state: Mapping[str, Any], factor: Fraction) -> ScaledSchedule:
    """Multiply every counter and every length of a torch scheduler's state by a factor.

    A length that ends a phase is rounded up: the phase then ends at the same update, because
    ``ceil(ceil(b * M / N) / M) == ceil(b / N)``. Periods (``step_size``), slopes (``total_iters``)
    and patience can become inexact.
    """
    result = ScaledSchedule({})
    for key, value in state.items():
        new = _scale_value(key, value, state, factor, result)
        result.state[key] = new
        if new != value and isinstance(new, (int, float)) and not key.startswith("_"):
            result.changes.append(f"{key} {value} -> {new}")
    return result


def _scale_value(
    key: str, value: Any, state: Mapping[str, Any], factor: Fraction, result: ScaledSchedule
) -> Any:
    rule = _RULES.get(key)
    if key == _INNER and isinstance(value, list):
        inner = [
            scale(item, factor) if isinstance(item, dict) else ScaledSchedule(item)
            for item in value
        ]
        result.inexact += [text for part in inner for text in part.inexact]
        return [part.state for part in inner]
    # A decay by gamma at each step has to reach the same value after more or fewer steps.
    if key == "gamma" and _decays_every_step(state):
        return float(value) ** float(1 / factor)
    if rule is None or value is None:
        return value
    # ConstantLR's total_iters, beside ``factor``, ends a phase; LinearLR's sets a slope.
    ends_phase = key == "total_iters" and "factor" in state
    if key in _WHOLE and not ends_phase and (value * factor).denominator != 1:
        result.inexact.append(f"{key} {value} x {factor} is not a whole number")
    return rule(value, factor)


def _decays_every_step(state: Mapping[str, Any]) -> bool:
    """Return whether ``gamma`` applies at each step (ExponentialLR, a mode of CyclicLR)."""
    by_step = state.get("scale_mode", "iterations") == "iterations"  # of CyclicLR
    return by_step and not {"step_size", "milestones"} & state.keys()


def _scale_count(value: Any, factor: Fraction) -> Any:
    """Scale a whole number, rounding up; a negative counter means that nothing has started."""
    return ceil(value * factor) if isinstance(value, int) and value > 0 else value


def _scale_calls(value: Any, factor: Fraction) -> Any:
    """Scale ``_step_count``, which starts at 1: ``__init__`` makes the first call."""
    return 1 + (value - 1) * factor.numerator // factor.denominator if value else value


def _scale_length(value: Any, factor: Fraction) -> Any:
    new = Fraction(value) * factor
    return int(new) if new.denominator == 1 and isinstance(value, int) else float(new)


def _scale_milestones(value: Any, factor: Fraction) -> Any:
    if isinstance(value, list):
        return [_scale_count(milestone, factor) for milestone in value]
    if isinstance(value, Call) and value.name == _COUNTER and value.args:
        merged: dict[int, int] = {}
        for at, times in value.args[0].items():
            merged[_scale_count(at, factor)] = merged.get(_scale_count(at, factor), 0) + times
        return Call(_COUNTER, (merged,))
    return value


def _scale_phases(value: Any, factor: Fraction) -> Any:
    return [{**phase, "end_step": _scale_length(phase["end_step"], factor)} for phase in value]


_RULES: dict[str, Callable[[Any, Fraction], Any]] = {
    _STEPS: _scale_count,
    "_step_count": _scale_calls,
    "step_size": _scale_count,
    "milestones": _scale_milestones,
    "_milestones": _scale_milestones,
    "total_iters": _scale_count,
    "patience": _scale_count,
    "cooldown": _scale_count,
    "num_bad_epochs": _scale_count,
    "cooldown_counter": _scale_count,
    "T_max": _scale_length,
    "T_0": _scale_length,
    "T_i": _scale_length,
    "T_cur": _scale_length,
    "total_size": _scale_length,
    "total_steps": _scale_length,
    "_schedule_phases": _scale_phases,
}
