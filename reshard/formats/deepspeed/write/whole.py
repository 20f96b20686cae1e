"""Stage 0: the optimizer inside the model states, whole tensors under an index.

In fp32 it is the optimizer's own dict. In 16 bits it is wrapped (DeepSpeed 0.19.8
``runtime/fp16/unfused_optimizer.py``): fp32 copies a group, whole. Around an optimizer of
DeepSpeed's own (``fused_optimizer.py``) masters and state are one flat tensor a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from reshard.containers.torch_writer import Slot, build_whole_tensor
from reshard.dtypes import FLOAT32, DType
from reshard.formats.deepspeed import expert_layout
from reshard.formats.deepspeed.write import scaling
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.objects import deepspeeds_own, step
from reshard.formats.deepspeed.write.pieces import Value, piece, storage
from reshard.formats.deepspeed.write.slots import (
    dtype_of,
    master_of,
    names_of,
    slot_named,
    step_of,
)
from reshard.state_dict import optimizer_names, torch_state_dict
from reshard.training.state import TrainedGroup, TrainedParameter

_CLIP = 1.0  # GRADIENT_CLIPPING_DEFAULT; FP16_Optimizer asks for a value


def optimizer(choice: Choice) -> dict[str, Any]:
    """What the model states hold under ``optimizer``."""
    if choice.precision == FLOAT32:
        return _by_parameter(choice)
    kept = scaling.loose(choice.scaler, choice.state.step())
    if any(deepspeeds_own(group.hyper) for group in choice.groups):
        return {
            **kept,
            "optimizer_state_dict": _by_group(choice),
            "fp32_groups_flat": [
                _flat(group.members, FLOAT32, master_of) for group in choice.groups
            ],
            "clip_grad": _CLIP if choice.clip is None else choice.clip,
        }
    return {
        **kept,
        "optimizer_state_dict": _by_parameter(choice),
        "fp32_groups": [
            [build_whole_tensor(member.weight.value, FLOAT32) for member in group.members]
            for group in choice.groups
        ],
    }


def _by_parameter(choice: Choice) -> dict[str, Any]:
    groups = (
        (group.hyper, [(member.fqn, _state(member, group)) for member in group.members])
        for group in choice.groups
    )
    return torch_state_dict.assemble_optimizer(groups, named=not _are_told(choice))


def _state(member: TrainedParameter, group: TrainedGroup) -> dict[str, Any]:
    if not member.slots:
        return {}
    counted = {} if member.step is None else {"step": step(member.step, group.hyper)}
    return counted | {
        name: build_whole_tensor(slot, slot.dtype) for name, slot in member.slots.items()
    }


def _by_group(choice: Choice) -> dict[str, Any]:
    path = choice.state.manifest.origin.path
    state: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(choice.groups):
        count = step_of(group.members, path)
        held = {} if count is None else {"step": step(count, group.hyper)}
        for name in names_of(group.members):
            dtype = dtype_of(name, group.members)
            held[name] = _flat(group.members, dtype, slot_named(name))
        if held:
            state[number] = held
    param_groups = choice.param_groups()
    if not _are_told(choice):
        listed = zip(param_groups, choice.groups, strict=True)
        param_groups = [{**made, "param_names": group.fqns} for made, group in listed]
    return {"state": state, "param_groups": param_groups}


def _are_told(choice: Choice) -> bool:
    """Whether shapes say whose each number is; where they do not, names stand beside it.

    Experts are in groups of their own.
    """
    buffers = {buffer.fqn for buffer in choice.buffers}
    candidates = {
        weight.fqn: weight.shape
        for weight in choice.state.weights
        if weight.value.numel and weight.fqn not in buffers
    }
    experts = {fqn for fqn in candidates if expert_layout.parse_expert_name(fqn)}
    return all(
        optimizer_names.can_name_groups(
            {fqn: shape for fqn, shape in candidates.items() if (fqn in experts) == of_experts},
            [g for g in choice.groups if expert_layout.has_experts(g.hyper) == of_experts],
        )
        for of_experts in ((False, True) if experts else (False,))
    )


def _flat(members: Sequence[TrainedParameter], dtype: DType, value: Value) -> Slot:
    """The members one after the other, without padding."""
    pieces = []
    at = 0
    for member in members:
        numel = prod(member.weight.shape)
        pieces.append(piece(member, 0, numel, at))
        at += numel
    return Slot(storage(dtype, at, pieces, value), (at,))
