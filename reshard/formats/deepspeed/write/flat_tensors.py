"""Lay out flat tensors: which runs of parameters are in them, and the state that members share.

The runs are at the same positions in the masters and in every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.box import Box, run_boxes
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import MASTER, Entry
from reshard.errors import IncompleteError, UnsupportedError
from reshard.layouts.partition import compute_equal_piece
from reshard.training import optimizers
from reshard.training.shared_scalars import build_shared_scalars
from reshard.training.state import (
    TrainedGroup,
    TrainedParameter,
    WritableState,
    collect_scalar_names,
    collect_slot_names,
)

# A run of a parameter in a flat tensor: its blocks, each with the element at which it begins.
MemberRun = tuple[TrainedParameter, Sequence[tuple[Box, int]]]
FindEntry = Callable[[TrainedParameter], Entry | None]  # a member's master, or one of its slots


def cut_run(member: TrainedParameter, start: int, stop: int, offset: int) -> MemberRun:
    """Return the run ``[start, stop)`` of a parameter, which begins at element ``offset``."""
    return member, list(_place_boxes(member.weight.value, start, stop, offset))


def concatenate(members: Iterable[TrainedParameter], ranks: int = 1) -> tuple[list[MemberRun], int]:
    """Return the first rank's equal piece of each member, end to end, and the number of elements.

    Each piece takes the space of a padded share, so other ranks' pieces begin at the same element.
    """
    runs, at = [], 0
    for member in members:
        numel = prod(member.weight.shape)
        runs.append(cut_run(member, *compute_equal_piece(numel, ranks, 0), at))
        at += -(-numel // ranks)
    return runs, at


def build_flat_tensor(
    dtype: DType, numel: int, runs: Iterable[MemberRun], value: FindEntry, *, grad: bool = False
) -> StorageView:
    """Return a flat tensor; it has zeros where a parameter has no such value."""
    parts = []
    for member, boxes in runs:
        entry = value(member)
        if entry is not None:
            parts += [_make_part(entry, box, at) for box, at in boxes]
    return StorageView(Storage(dtype, numel, tuple(parts)), (numel,), requires_grad=grad)


def build_run_parts(entry: Entry, start: int, stop: int) -> tuple[StorageBlock, ...]:
    """Return the run ``[start, stop)`` of an entry as the content of its own tensor."""
    return tuple(_make_part(entry, box, at) for box, at in _place_boxes(entry, start, stop, 0))


def _make_part(entry: Entry, box: Box, at: int) -> StorageBlock:
    return StorageBlock(entry.kind, entry.fqn, entry.shape, box, at)


def _place_boxes(entry: Entry, start: int, stop: int, at: int) -> Iterator[tuple[Box, int]]:
    for box in run_boxes(entry.shape, start, stop):
        yield box, at
        at += box.volume


def get_master(member: TrainedParameter) -> Entry:
    """Return a parameter's most precise value."""
    return member.weight.value


def choose_master_dtype(members: Sequence[TrainedParameter]) -> DType:
    """Return the dtype of the masters: the source's, if it has masters of one dtype.

    They are 16-bit with ``bf16_master_weights_and_grads``. Parameters of which the source has no
    master become float32.
    """
    dtypes = {m.weight.value.dtype if m.weight.value.kind == MASTER else FLOAT32 for m in members}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def pick_slot(name: str) -> FindEntry:
    """Return a function that picks a slot of a member; None if it was never stepped."""
    return lambda member: member.slots.get(name)


def collect_slot_dtypes(members: Sequence[TrainedParameter]) -> dict[str, DType]:
    """Return the slots that have the members' shapes, in order of first appearance.

    A slot has the dtype that all members have it in, or float32 if they differ.
    """
    scalars = collect_scalar_names(members)
    common = {}
    for name in collect_slot_names(members):
        dtypes = {member.slots[name].dtype for member in members if name in member.slots}
        if name not in scalars:
            common[name] = dtypes.pop() if len(dtypes) == 1 else FLOAT32
    return common


def make_scalars(members: Sequence[TrainedParameter]) -> dict[str, StorageView]:
    """Return the 0-d values of a flat tensor's state."""
    why = "ZeRO keeps one value for all parameters of a group"
    remedy = "stage 0 keeps one for each parameter: --zero-stage 0"
    return build_shared_scalars(members, why, remedy)


def find_common_step(
    state: WritableState, group: TrainedGroup, members: Sequence[TrainedParameter]
) -> float | None:
    """Return how many updates all members with state have seen; None if nothing counts them.

    Args:
        group: the members' group, in whose hyper-parameters some optimizers count.

    Raises:
        IncompleteError: a member lacks a slot that others have, or the number of its updates.
        UnsupportedError: members have seen different numbers of updates.
    """
    path = state.manifest.origin.path
    names = collect_slot_names(members)
    stepped = [member for member in members if member.slots]
    for member in stepped:
        missing = [name for name in names if name not in member.slots]
        if missing:
            raise IncompleteError(path, f"does not contain the {missing[0]} of {member.fqn!r}")
        counted = member.step is not None or "step" in group.hyper
        if not counted and optimizers.needs_count(names):
            raise IncompleteError(
                path,
                f"does not state how often {member.fqn!r} was updated",
                "start a new Adam with --init-optimizer zeros, or write only the weights with"
                " --weights-only",
            )
    steps = {member.step: member.fqn for member in stepped}
    if len(steps) > 1:
        (one, first), (other, second) = list(steps.items())[:2]
        raise UnsupportedError(
            path,
            f"{first!r} was updated {one} times and {second!r} {other} times, but ZeRO keeps one"
            " count for all parameters of a group",
            "write --zero-stage 0, which keeps one count for each parameter",
        )
    return next(iter(steps), None)
