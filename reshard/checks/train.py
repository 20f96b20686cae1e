"""Everything of two training states that is no tensor: steps, groups, scheduler, scaler ..."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.manifest import Manifest, TrainState
from reshard.training import loss_scale
from reshard.training.trainer_run import Run, is_document
from reshard.units import some

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Value:
    """Something that is not the same on both sides; None where a side has nothing."""

    name: str
    a: Any
    b: Any

    @property
    def only(self) -> str:
        """``a`` or ``b`` where one side alone has it; empty where they differ."""
        return "b" if self.a is None else "a" if self.b is None else ""


def differences(a: Manifest, b: Manifest) -> Iterator[Value]:
    """What differs, by name.

    Hyper-parameters are compared parameter by parameter, so that groups may be cut and ordered as
    each framework does it; of a group's keys those that both sides have (``foreach``, ``fused``
    and the like are of one library). A loss scaler is compared in torch's form.
    """
    one, two = a.train, b.train
    yield from _unequal("step", _step(one), _step(two))
    yield from _unequal("skipped_steps", one.skipped_steps or None, two.skipped_steps or None)
    for name in ("samples", "scheduler", "rng"):
        yield from _unequal(name, getattr(one, name), getattr(two, name))
    if one.clip is not None and two.clip is not None:  # few layouts have a place for it
        yield from _unequal("gradient clipping", one.clip, two.clip)
    yield from _unequal("scaler", _scaler(one), _scaler(two))
    yield from _mapped("client", one.client, two.client)
    if one.trainer_state is not None and two.trainer_state is not None:
        yield from _mapped(
            "trainer_state", _account(one.trainer_state), _account(two.trainer_state)
        )
    yield from _steps(one.optimizer_step, two.optimizer_step)
    yield from _loose(one.non_tensor_state, two.non_tensor_state)
    yield from _hypers(one, two)


def _account(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a trainer's account says of the training, and not of the ranks of one start."""
    return Run(document).state() if is_document(document) else document


def _step(train: TrainState) -> float | None:
    """The run's counter, else the optimizer's, as a target derives it."""
    return (
        train.step if train.step is not None else max(train.optimizer_step.values(), default=None)
    )


def _unequal(name: str, a: Any, b: Any) -> Iterator[Value]:
    if _plain(a) != _plain(b):
        yield Value(name, a, b)


def _plain(value: Any) -> Any:
    """Without the differences that a file format makes: tuples and lists, texts for numbers."""
    if isinstance(value, Mapping):
        plain = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, item in plain.items() if not _is_empty(item)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _is_empty(value: Any) -> bool:
    """Whether it holds nothing: DCP loses empty dicts."""
    return isinstance(value, (dict, list)) and all(map(_is_empty, value))


def _scaler(train: TrainState) -> Any:
    if loss_scale.is_idle(train.scaler):
        return None
    return loss_scale.convert_to_torch(train.scaler) or train.scaler


def _mapped(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Value]:
    for key in dict.fromkeys((*a, *b)):
        yield from _unequal(f"{name}: {key}", a.get(key), b.get(key))


def _loose(
    a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]
) -> Iterator[Value]:
    """What optimizers keep beside tensors and steps; one value for all with the same difference."""
    found: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for fqn in dict.fromkeys((*a, *b)):
        left, right = a.get(fqn, {}), b.get(fqn, {})
        for key in dict.fromkeys((*left, *right)):
            one, two = left.get(key), right.get(key)
            if _plain(one) != _plain(two):
                same = key, repr(one), repr(two)
                found.setdefault(same, (one, two, []))[-1].append(fqn)
    for (key, _, _), (one, two, fqns) in found.items():
        yield Value(f"optimizer state: {key} of {some(fqns, 1)}", one, two)


def _steps(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[Value]:
    """One value for all parameters with the same difference."""
    found: dict[tuple[float | None, float | None], list[str]] = {}
    for fqn in dict.fromkeys((*a, *b)):
        if a.get(fqn) != b.get(fqn):
            found.setdefault((a.get(fqn), b.get(fqn)), []).append(fqn)
    for (left, right), fqns in found.items():
        yield Value(f"optimizer step of {some(fqns, 1)}", left, right)


def _hypers(a: TrainState, b: TrainState) -> Iterator[Value]:
    """One value for all parameters with the same difference."""
    one, two = _by_parameter(a), _by_parameter(b)
    if bool(one) != bool(two):
        yield Value("param groups", len(a.param_groups) or None, len(b.param_groups) or None)
        return
    found: dict[tuple[str, str, str], list[str]] = {}
    for fqn in dict.fromkeys((*one, *two)):
        if fqn not in one or fqn not in two:
            found.setdefault(("in a group", str(fqn in one), str(fqn in two)), []).append(fqn)
            continue
        left, right = one[fqn], two[fqn]
        for key in left:
            if key in right and _plain(left[key]) != _plain(right[key]):
                found.setdefault((key, repr(left[key]), repr(right[key])), []).append(fqn)
    for (key, left_text, right_text), fqns in found.items():
        yield Value(f"{key} of {some(fqns, 1)}", left_text, right_text)


def _by_parameter(train: TrainState) -> dict[str, Mapping[str, Any]]:
    return {fqn: group.hyper for group in train.param_groups for fqn in group.fqns}
