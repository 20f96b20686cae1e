"""ZeRO stage 3: the optimizer states of every rank.

Geometry (DeepSpeed 0.19.8 ``runtime/zero/stage3.py``, ``partition_parameters.py``): each parameter
in ``ceil(numel / ranks)`` elements a rank, the last ranks' padded; in a sub-group's flat tensor a
rank's pieces stand one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from reshard.containers.torch_writer import Slot, Storage
from reshard.dtypes import DType
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.objects import scaler, stage_enum, step
from reshard.formats.deepspeed.write.pieces import Piece, Value, piece, run_of, storage
from reshard.formats.deepspeed.write.slots import (
    dtype_of,
    master_dtype,
    master_of,
    names_of,
    scalars_of,
    slot_named,
    step_of,
)
from reshard.layout.partition import equal_piece
from reshard.manifest import Entry
from reshard.training.state import TrainedGroup, TrainedParameter

_Pieces = tuple[list[Piece], int]  # of one sub-group, and the elements that they take


def first_rank(choice: Choice) -> dict[str, Any]:
    """The first rank's ``optimizer_state_dict``; the others' differ in the tensors' values alone.

    Its run of a parameter is as long as any, and the others' begin where it begins.
    """
    path = choice.state.manifest.origin.path
    steps = [step_of(group.members, path) for group in choice.groups]
    pieces = [_pieces(members, choice.world_size) for members in choice.flats]
    states = {
        flat: _state(group, count, pieces[flat])
        for group, count, flats in zip(choice.groups, steps, choice.flats_of, strict=True)
        for flat in flats
    }
    return {
        "zero_stage": stage_enum(choice.stage),
        "loss_scaler": scaler(choice.scaler),
        "dynamic_loss_scale": choice.scaler["dynamic"],
        "overflow": False,
        "partition_count": choice.world_size,
        "optimizer_state_dict": {
            "state": {flat: state for flat, state in states.items() if state},
            "param_groups": choice.param_groups(),
        },
        "fp32_flat_groups": [
            _tensor(held, master_dtype(members), master_of, grad=True)
            for held, members in zip(pieces, choice.flats, strict=True)
        ],
    }


def _pieces(members: Sequence[TrainedParameter], ranks: int) -> _Pieces:
    at, pieces = 0, []
    for member in members:
        numel = prod(member.weight.shape)
        pieces.append(piece(member, *equal_piece(numel, ranks, 0), at))
        at += -(-numel // ranks)
    return pieces, at


def _state(group: TrainedGroup, count: float | None, pieces: _Pieces) -> dict[str, Any]:
    """The state of one sub-group; empty where the group was never stepped.

    A sub-group that alone was never stepped has the slots of its group, for one step counts for
    all.
    """
    state: dict[str, Any] = {} if count is None else {"step": step(count, group.hyper)}
    for name in names_of(group.members):
        state[name] = _tensor(pieces, dtype_of(name, group.members), slot_named(name))
    return state | scalars_of(group.members)


def _tensor(pieces: _Pieces, dtype: DType, value: Value, *, grad: bool = False) -> Slot:
    held, numel = pieces
    return Slot(storage(dtype, numel, held, value), (numel,), requires_grad=grad)


def fragment(entry: Entry, dtype: DType, ranks: int, rank: int) -> Slot:
    """A rank's piece of a parameter that is not optimized."""
    numel = -(-entry.numel // ranks)
    parts = run_of(entry, *equal_piece(entry.numel, ranks, rank))
    return Slot(Storage(dtype, numel, parts), (numel,))
