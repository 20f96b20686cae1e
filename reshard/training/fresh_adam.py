"""Start an Adam at step 0, with moments of zeros, where a source has no state of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.errors import UnsupportedError, UsageError
from reshard.training.optimizers import AMSGRAD, MOMENTS, is_adam
from reshard.training.param_groups import StateAndNotes
from reshard.training.state import TrainedGroup, TrainedParameter, Weight, WritableState
from reshard.units import abridge

_LISTED = 4

# torch 2.13 optim/adamw.py, AdamW.__init__; without its learning rate, which the run must give.
_ADAMW: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
}


def start_adam(state: WritableState, dtype: DType) -> StateAndNotes:
    """Return the state with an Adam before its first update: moments of zeros, step 0.

    Its slots are entries without chunks, listed in `WritableState.zero_slots`. No file stores them;
    bytes that no chunk fills are zero.

    Args:
        dtype: dtype of the moments, which is that of the updated weights.
    """
    groups = tuple(
        _build_group(state, number, group, dtype) for number, group in enumerate(state.groups)
    )
    count = sum(len(group.members) for group in groups)
    names = dict.fromkeys(name for group in groups for m in group.members for name in m.slots)
    notes = [f"Adam at step 0 for {count} parameters: {', '.join(names)} are zero ({dtype})"]
    own = dict.fromkeys(key for group in state.groups for key in _ADAMW if key not in group.hyper)
    if own:
        defaults = ", ".join(f"{key} {_ADAMW[key]}" for key in own)
        notes.append(
            f"hyper-parameters not given: torch.optim.AdamW's defaults are used, {defaults}"
        )
    # What the source's optimizer keeps beside tensors does not belong to the new Adam.
    train = replace(state.manifest.train, non_tensor_state={})
    return replace(state, manifest=replace(state.manifest, train=train), groups=groups), notes


def find_idle(
    groups: Iterable[tuple[Mapping[str, Any], Collection[str]]],
    slots: Mapping[str, Collection[str]],
    numel: Mapping[str, int],
) -> dict[str, tuple[str, ...]]:
    """Return the parameters for which an Adam has no state, each with the slots that it lacks.

    torch's distributed state dicts refuse a checkpoint in which a trainable parameter has no state,
    even one that they saved themselves (2.13 ``distributed/checkpoint/state_dict.py``). Zeros at
    step 0 are an Adam's own start, so they change nothing. They also change nothing for a frozen
    parameter, which a file does not distinguish from an idle one. If most elements have no state,
    they are a frozen base model, whose zeros would be most of the optimizer; then the result is
    empty.

    Args:
        groups: the hyper-parameters and the parameters of each param group.
        slots: parameter -> its slots.
        numel: parameter -> its number of elements.
    """
    groups = list(groups)
    names = tuple(dict.fromkeys(name for held in slots.values() for name in held))
    if not names:  # no parameter was stepped
        all_adam = all(is_adam(hyper) for hyper, _ in groups)
        return {fqn: list_slots(hyper) for hyper, fqns in groups for fqn in fqns if all_adam}
    if not set(MOMENTS) <= set(names) <= {*MOMENTS, AMSGRAD}:
        return {}
    idle = [fqn for hyper, fqns in groups if is_adam(hyper) for fqn in fqns if not slots.get(fqn)]
    trained = sum(numel.get(fqn, 0) for fqn, held in slots.items() if held)
    few = sum(numel.get(fqn, 0) for fqn in idle) <= trained
    return dict.fromkeys(idle, names) if few else {}


def _find_new(groups: Iterable[TrainedGroup]) -> dict[str, tuple[str, ...]]:
    return {
        member.fqn: list_slots(group.hyper)
        for group in groups
        if is_adam(group.hyper)
        for member in group.members
        if member.step == 0 and not member.slots
    }


def list_slots(hyper: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the slots of an Adam with these hyper-parameters."""
    return (*MOMENTS, *[AMSGRAD] * bool(hyper.get("amsgrad")))


def start_idle(state: WritableState, dtype: DType) -> StateAndNotes:
    """Return the state with Adam's zeros for the parameters that it has never updated.

    Args:
        dtype: dtype of the moments if the source has none, which is that of the updated weights.
    """
    members = state.members
    idle = _find_new(state.groups) | find_idle(
        ((group.hyper, group.fqns) for group in state.groups),
        {member.fqn: member.slots for member in members},
        {member.fqn: member.weight.value.numel for member in members},
    )
    if not idle:
        return state, []
    dtypes = {name: entry.dtype for member in members for name, entry in member.slots.items()}

    def start(member: TrainedParameter) -> TrainedParameter:
        slots = {
            name: _build_zeros(member.weight, name, dtypes.get(name, dtype))
            for name in idle[member.fqn]
        }
        return TrainedParameter(member.weight, slots, 0.0)

    groups = tuple(
        replace(group, members=tuple(start(m) if m.fqn in idle else m for m in group.members))
        for group in state.groups
    )
    whose = abridge([member.fqn for member in members if member.fqn in idle], _LISTED)
    why = "(never stepped, or frozen)" if dtypes else "(it has made no step)"
    note = f"Adam has no state of {whose} {why}: zeros at step 0 are written"
    return replace(state, groups=groups), [note]


def _build_group(
    state: WritableState, number: int, group: TrainedGroup, dtype: DType
) -> TrainedGroup:
    if "lr" not in group.hyper:
        raise UsageError(
            "--init-optimizer zeros",
            f"group {number} has no learning rate: {state.manifest.origin.path} does not state"
            " one, and none was passed",
            'pass it: --param-groups FILE with [{"lr": 1e-4, "weight_decay": 0.1}], or one'
            ' entry with "match" for each group',
        )
    # SGD and RMSprop have momentum; a group with state but without betas is of another optimizer.
    if "momentum" in group.hyper or (
        "betas" not in group.hyper and any(member.slots for member in group.members)
    ):
        raise UnsupportedError(
            state.manifest.origin.path,
            "was trained by another optimizer than the Adam that --init-optimizer zeros starts",
            "write only the weights with --init-optimizer none",
        )
    hyper = {**group.hyper, **{k: v for k, v in _ADAMW.items() if k not in group.hyper}}
    members = tuple(
        TrainedParameter(
            m.weight,
            {name: _build_zeros(m.weight, name, dtype) for name in list_slots(hyper)},
            0.0,
        )
        for m in group.members
    )
    return TrainedGroup(hyper, members)


def _build_zeros(weight: Weight, slot: str, dtype: DType) -> Entry:
    return Entry(weight.fqn, slot, dtype, weight.shape, ())
