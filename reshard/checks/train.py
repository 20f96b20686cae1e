"""Comparison of two training states apart from their tensors: steps, groups, scheduler, scaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from reshard.core.differences import list_unequal
from reshard.core.manifest import Manifest, ParamGroup, TrainState
from reshard.training import loss_scale
from reshard.training.trainer_run import TrainerRun, is_document
from reshard.units import abridge, shorten

# Settings of torch's and of DeepSpeed's optimizers that decide what an update does.
_OF_UPDATES = frozenset(
    "lr betas weight_decay eps momentum dampening nesterov alpha lambd amsgrad maximize centered"
    " bias_correction decoupled_weight_decay".split()
)


_SHOWN = 60  # characters of a value
_LISTED = 4  # values inside of a dict or a list


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A value that differs between the two sides; None if a side lacks it.

    Args:
        steers_updates: whether it is a setting of the optimizer from which updates are computed.
    """

    name: str
    a: Any
    b: Any
    steers_updates: bool = False

    @property
    def only(self) -> str:
        """``a`` or ``b`` if only that side has the value; empty if both have one."""
        return "b" if self.a is None else "a" if self.b is None else ""

    def describe(self) -> str:
        """Return the values, or of two dicts or lists those inside of them that differ."""
        leaves = [
            f"{self.name}{path}: {shorten(a, _SHOWN)} and {shorten(b, _SHOWN)}"
            for path, a, b in list_unequal(self.a, self.b, _is_same)
        ]
        more = f"; {len(leaves) - _LISTED} more" if len(leaves) > _LISTED else ""
        return "; ".join(leaves[:_LISTED]) + more


def find_differences(a: Manifest, b: Manifest) -> Iterator[StateDifference]:
    """Yield the values that differ, by name.

    Hyper-parameters are compared parameter by parameter, as frameworks split and order groups
    differently. Only keys that both groups have are compared: ``foreach``, ``fused`` and others
    exist in one library only. Loss scalers are converted to torch's form first.
    """
    one, two = a.train, b.train
    yield from _compare_values("step", _get_step(one), _get_step(two))
    # No count is the same as 0: not every layout can store it.
    yield from _compare_values(
        "skipped_steps", one.skipped_steps or None, two.skipped_steps or None
    )
    for name in ("samples", "scheduler", "rng"):
        yield from _compare_values(name, getattr(one, name), getattr(two, name))
    if one.clip is not None and two.clip is not None:  # few layouts store it
        yield from _compare_values("gradient clipping", one.clip, two.clip)
    yield from _compare_values("scaler", _normalize_scaler(one), _normalize_scaler(two))
    yield from _compare_mappings("client", one.client, two.client)
    if one.trainer_state is not None and two.trainer_state is not None:
        yield from _compare_mappings(
            "trainer_state",
            _select_run_state(one.trainer_state),
            _select_run_state(two.trainer_state),
        )
    steps = _compare_optimizer_steps(one.optimizer_step, two.optimizer_step)
    states = _compare_non_tensor_state(one.non_tensor_state, two.non_tensor_state)
    yield from _group_by_difference(chain(steps, states))
    groups = one.group_of, two.group_of
    if bool(groups[0]) != bool(groups[1]):
        yield StateDifference(
            "param groups", len(one.param_groups) or None, len(two.param_groups) or None
        )
    else:
        yield from _group_by_difference(_compare_hyperparameters(*groups))


def _select_run_state(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return TrainerRun(document).list_training_values() if is_document(document) else document


def _get_step(train: TrainState) -> float | None:
    """Return the run's step counter, else the optimizer's, like the writers do."""
    return (
        train.step if train.step is not None else max(train.optimizer_step.values(), default=None)
    )


def _compare_values(name: str, a: Any, b: Any) -> Iterator[StateDifference]:
    if not _is_same(a, b):
        yield StateDifference(name, a, b)


def _is_same(a: Any, b: Any) -> bool:
    return bool(_normalize(a) == _normalize(b))


def _normalize(value: Any) -> Any:
    """Remove the differences that file formats cause: tuples or lists, str or int keys."""
    if isinstance(value, Mapping):
        plain = {str(key): _normalize(item) for key, item in value.items()}
        return {key: item for key, item in plain.items() if not _is_empty(item)}
    if isinstance(value, (list, tuple)):
        return [_normalize(item) for item in value]
    return value


def _is_empty(value: Any) -> bool:
    """Return whether a container has no values: DCP does not keep empty dicts."""
    return isinstance(value, (dict, list)) and all(map(_is_empty, value))


def _normalize_scaler(train: TrainState) -> Any:
    if loss_scale.is_idle(train.scaler):
        return None
    return loss_scale.convert_to_torch(train.scaler) or train.scaler


def _compare_mappings(
    name: str, a: Mapping[str, Any], b: Mapping[str, Any]
) -> Iterator[StateDifference]:
    for key in dict.fromkeys((*a, *b)):
        yield from _compare_values(f"{name}: {key}", a.get(key), b.get(key))


def _group_by_difference(
    values: Iterable[tuple[str, str, Any, Any]],
) -> Iterator[StateDifference]:
    """Yield one item for all parameters that differ in the same way: what, name, both values."""
    differences: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for what, fqn, a, b in values:
        differences.setdefault((what, repr(a), repr(b)), (a, b, []))[-1].append(fqn)
    for (what, _, _), (a, b, fqns) in differences.items():
        yield StateDifference(f"{what} of {abridge(fqns, 1)}", a, b, what in _OF_UPDATES)


def _compare_non_tensor_state(
    a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, Any, Any]]:
    for fqn in dict.fromkeys((*a, *b)):
        left, right = a.get(fqn, {}), b.get(fqn, {})
        for key in dict.fromkeys((*left, *right)):
            if not _is_same(left.get(key), right.get(key)):
                yield f"optimizer state: {key}", fqn, left.get(key), right.get(key)


def _compare_optimizer_steps(
    a: Mapping[str, float], b: Mapping[str, float]
) -> Iterator[tuple[str, str, Any, Any]]:
    for fqn in dict.fromkeys((*a, *b)):
        if a.get(fqn) != b.get(fqn):
            yield "optimizer step", fqn, a.get(fqn), b.get(fqn)


def _compare_hyperparameters(
    one: Mapping[str, ParamGroup], two: Mapping[str, ParamGroup]
) -> Iterator[tuple[str, str, Any, Any]]:
    for fqn in dict.fromkeys((*one, *two)):
        if fqn not in one or fqn not in two:
            yield "in a group", fqn, str(fqn in one), str(fqn in two)
            continue
        left, right = one[fqn].hyper, two[fqn].hyper
        for key in left:
            if key in right and not _is_same(left[key], right[key]):
                yield key, fqn, repr(left[key]), repr(right[key])
