"""Lay out ZeRO stage 3: the optimizer states of every rank.

Geometry (DeepSpeed 0.19.8 ``runtime/zero/stage3.py``, ``partition_parameters.py``): each parameter
in ``ceil(numel / ranks)`` elements on each rank, the last ranks' padded; in a sub-group's flat
tensor a rank's pieces stand one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.containers.torch_writer import Storage, StorageView
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.formats.deepspeed.write.flat_tensors import (
    MemberRun,
    build_flat_tensor,
    build_run_parts,
    choose_master_dtype,
    collect_slot_dtypes,
    concatenate,
    find_common_step,
    get_master,
    make_scalars,
    pick_slot,
)
from reshard.formats.deepspeed.write.pickled_objects import (
    make_scaler_object,
    make_stage_enum,
    make_step_state,
)
from reshard.formats.deepspeed.write.spec import OutputSpec
from reshard.layouts.partition import compute_equal_piece
from reshard.state_dict.optimizers import nested_slots
from reshard.training.shared_scalars import copy_scalars
from reshard.training.state import TrainedGroup, TrainedParameter

_Runs = tuple[list[MemberRun], int]  # the runs of one sub-group, and their number of elements


def make_first_rank(spec: OutputSpec) -> dict[str, Any]:
    """Return the first rank's ``optimizer_state_dict``; other ranks' differ only in their values.

    No rank's run of a parameter is longer than the first rank's, and all begin at the same element.
    """
    states: list[dict[str, Any]] = []
    masters: list[StorageView] = []
    for group, flats in zip(spec.groups, spec.flats_of, strict=True):
        count = find_common_step(spec.state, group, group.members)
        for members in flats:
            runs, numel = concatenate(members, spec.world_size)
            dtype = choose_master_dtype(members)
            masters.append(build_flat_tensor(dtype, numel, runs, get_master, grad=True))
            states.append(_make_state(group, members, count, (runs, numel)))
    return {
        "zero_stage": make_stage_enum(spec.stage),
        "loss_scaler": make_scaler_object(spec.scaler),
        "dynamic_loss_scale": spec.scaler["dynamic"],
        "overflow": False,
        "partition_count": spec.world_size,
        "optimizer_state_dict": {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": spec.build_param_groups(),
        },
        "fp32_flat_groups": masters,
    }


def _make_state(
    group: TrainedGroup, members: Sequence[TrainedParameter], count: float | None, runs: _Runs
) -> dict[str, Any]:
    # A sub-group that alone was never stepped has the slots of its group, because all share one
    # step.
    inside, numel = runs
    dtypes = collect_slot_dtypes(group.members)
    state = make_step_state(count, group.hyper, dtypes)
    for name, dtype in dtypes.items():
        state[name] = build_flat_tensor(dtype, numel, inside, pick_slot(name))
    has_state = any(member.slots for member in members)
    state |= make_scalars(members) if has_state else copy_scalars(group.members)
    return nested_slots.unflatten(state)


def make_fragment(entry: Entry, dtype: DType, ranks: int, rank: int) -> StorageView:
    """Return a rank's piece of a parameter that is not optimized."""
    numel = -(-entry.numel // ranks)
    parts = build_run_parts(entry, *compute_equal_piece(entry.numel, ranks, rank))
    return StorageView(Storage(dtype, numel, parts), (numel,))
