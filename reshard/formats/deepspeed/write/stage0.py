"""Lay out stage 0: the optimizer inside the model states, whole tensors under an index.

In fp32 it is the optimizer's own dict. In 16 bits it is wrapped (DeepSpeed 0.19.8
``runtime/fp16/unfused_optimizer.py``): fp32 copies of each group, whole. Around an optimizer of
DeepSpeed's own (``fused_optimizer.py``), masters and state are one flat tensor for each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.containers.torch_writer import build_whole_tensor
from reshard.core.box import Index
from reshard.core.dtypes import FLOAT32
from reshard.formats.deepspeed.experts.layout import has_experts, parse_expert_name
from reshard.formats.deepspeed.flat_order import find_shape_sorted_groups
from reshard.formats.deepspeed.write.flat_tensors import (
    build_flat_tensor,
    collect_slot_dtypes,
    concatenate,
    find_common_step,
    get_master,
    pick_slot,
)
from reshard.formats.deepspeed.write.pickled_objects import (
    is_deepspeed_optimizer,
    make_scaler_keys,
    make_step_state,
)
from reshard.formats.deepspeed.write.spec import OutputSpec
from reshard.state_dict import torch_state_dict
from reshard.state_dict.optimizers import nested_slots, numbering
from reshard.state_dict.optimizers.hyper_parameters import build_tensors
from reshard.training.state import TrainedGroup, TrainedParameter

_CLIP = 1.0  # GRADIENT_CLIPPING_DEFAULT; FP16_Optimizer requires a value


def make_optimizer(spec: OutputSpec) -> dict[str, Any]:
    """Return what the model states hold under ``optimizer``."""
    if spec.precision == FLOAT32:
        return _build_by_parameter(spec)
    scaler = make_scaler_keys(spec.scaler, spec.state.step)
    if any(is_deepspeed_optimizer(group.hyper) for group in spec.groups):
        joined = [concatenate(group.members) for group in spec.groups]
        return {
            **scaler,
            "optimizer_state_dict": _build_by_group(spec),
            "fp32_groups_flat": [
                build_flat_tensor(FLOAT32, numel, runs, get_master) for runs, numel in joined
            ],
            "clip_grad": _CLIP if spec.clip is None else spec.clip,
        }
    return {
        **scaler,
        "optimizer_state_dict": _build_by_parameter(spec),
        "fp32_groups": [
            [build_whole_tensor(member.weight.value, FLOAT32) for member in group.members]
            for group in spec.groups
        ],
    }


def _build_by_parameter(spec: OutputSpec) -> dict[str, Any]:
    groups = (
        (
            build_tensors(group.hyper),
            [(member.fqn, _build_state(member, group)) for member in group.members],
        )
        for group in spec.groups
    )
    return torch_state_dict.assemble_optimizer(groups, named=not _is_order_recoverable(spec))


def _build_state(member: TrainedParameter, group: TrainedGroup) -> dict[str, Any]:
    if not member.slots:
        return {}
    state = make_step_state(member.step, group.hyper, member.slots)
    return nested_slots.unflatten(
        state | {name: build_whole_tensor(slot, slot.dtype) for name, slot in member.slots.items()}
    )


def _build_by_group(spec: OutputSpec) -> dict[str, Any]:
    states: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(spec.groups):
        count = find_common_step(spec.state, group, group.members)
        dtypes = collect_slot_dtypes(group.members)
        state = make_step_state(count, group.hyper, dtypes)
        runs, numel = concatenate(group.members)
        for name, dtype in dtypes.items():
            state[name] = build_flat_tensor(dtype, numel, runs, pick_slot(name))
        if state:
            states[number] = nested_slots.unflatten(state)
    param_groups = spec.build_param_groups()
    if not _is_order_recoverable(spec):
        listed = zip(param_groups, spec.groups, strict=True)
        param_groups = [{**stored, "param_names": group.fqns} for stored, group in listed]
    return {"state": states, "param_groups": param_groups}


def _is_order_recoverable(spec: OutputSpec) -> bool:
    # Groups of experts and other groups are checked separately, because the reader names them so.
    buffers = {buffer.fqn for buffer in spec.buffers}
    stated = {member.fqn for group in spec.groups for member in group.members if member.slots}
    candidates = {
        weight.fqn: weight.shape
        for weight in spec.state.weights
        if (weight.value.numel or weight.fqn in stated) and weight.fqn not in buffers
    }
    experts = {fqn for fqn in candidates if parse_expert_name(fqn)}
    return all(
        _can_name(
            {fqn: shape for fqn, shape in candidates.items() if (fqn in experts) == of_experts},
            [group for group in spec.groups if has_experts(group.hyper) == of_experts],
        )
        for of_experts in ((False, True) if experts else (False,))
    )


def _can_name(candidates: Mapping[str, Index], groups: Sequence[TrainedGroup]) -> bool:
    by_shape = find_shape_sorted_groups(group.hyper for group in groups)
    return numbering.can_name_groups(candidates, groups, by_shape)
