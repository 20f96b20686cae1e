"""ZeRO stages 1 and 2, and BF16_Optimizer: the optimizer states of every rank.

Geometry (DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py``, ``__init__``): a group's parameters
one after the other, each but the last followed by its alignment padding, then a tail that makes the
whole a multiple of twice the ranks that share it: all, or those that hold the same experts. Masters
are stored without the tail, slots with it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod
from typing import Any

from reshard.containers.torch_writer import Slot
from reshard.formats.deepspeed import order
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.objects import (
    WRITTEN_AS,
    address,
    scaler,
    stage_enum,
    step,
)
from reshard.formats.deepspeed.write.pieces import Piece, piece, storage
from reshard.formats.deepspeed.write.slots import (
    dtype_of,
    master_dtype,
    master_of,
    names_of,
    scalars_of,
    slot_named,
    step_of,
)
from reshard.pickles.values import Call
from reshard.training.state import TrainedGroup, TrainedParameter

ALIGNMENT = 2  # nccl_start_alignment_factor
_ALIGNED_BYTES = 16  # parameter_alignment: where every parameter of the module begins


class Flat:
    """All groups, laid out once; `of_rank` cuts a rank's pieces."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._groups = [
            _Group(choice, group, flat)
            for group, flat in zip(choice.groups, choice.flats, strict=True)
        ]

    def of_rank(self, rank: int) -> dict[str, Any]:
        """One rank's ``optimizer_state_dict``."""
        choice = self._choice
        shares = [
            laid.share(choice.share(group, rank))
            for group, laid in zip(choice.groups, self._groups, strict=True)
        ]
        return {
            "loss_scaler": scaler(choice.scaler),
            "dynamic_loss_scale": choice.scaler["dynamic"],
            "overflow": False,
            **({} if choice.clip is None else {"clip_grad": choice.clip}),  # else the run's own
            "base_optimizer_state": {
                "state": {number: s.state for number, s in enumerate(shares) if s.state},
                "param_groups": choice.param_groups(),
            },
            "single_partition_of_fp32_groups": [share.master for share in shares],
            "zero_stage": stage_enum(choice.stage),
            "group_paddings": [share.padding for share in shares],
            "param_alignment_paddings": [list(group.paddings) for group in self._groups],
            "partition_count": [choice.sharers(group) for group in choice.groups],
            "ds_version": WRITTEN_AS,
            "param_slice_mappings": [share.addresses for share in shares],
        }


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank holds of a group; no state where the group was never stepped."""

    master: Slot
    state: dict[str, Any]
    padding: int
    addresses: OrderedDict[str, Call]


class _Group:
    """One group's flat tensor, its members in flat order."""

    def __init__(
        self, choice: Choice, group: TrainedGroup, flat: Sequence[TrainedParameter]
    ) -> None:
        self._group = group
        self._flat = flat
        self._listed = choice.listed
        self._order = {member.fqn: number for number, member in enumerate(group.members)}
        self.paddings = _paddings(flat, _alignment(choice, flat))
        sizes = [prod(member.weight.shape) for member in flat]
        ends = accumulate(map(sum, zip(sizes, self.paddings, strict=True)), initial=0)
        self._starts = list(ends)[: len(flat)]
        self._stops = [start + numel for start, numel in zip(self._starts, sizes, strict=True)]
        self._end = self._stops[-1] if flat else 0
        self._numel = -(-self._end // (ALIGNMENT * choice.sharers(group))) * ALIGNMENT
        self._dtypes = {name: dtype_of(name, flat) for name in names_of(flat)}
        self._master = master_dtype(flat)
        self._scalars = scalars_of(flat)
        self._by_member = _keeps_matrices(choice, group)
        self._step = step_of(flat, choice.state.manifest.origin.path)

    def share(self, rank: int) -> _Share:
        """One rank's, by its place among those that share the group."""
        pieces = list(self._pieces(rank))
        padding = min(max((rank + 1) * self._numel - self._end, 0), self._numel)
        state: dict[str, Any] = {}
        if self._step is not None:
            state["step"] = step(self._step, self._group.hyper)
        for name, dtype in self._dtypes.items():
            numel, inside = self._numel, pieces
            if self._by_member:
                numel, inside = _whole_members(pieces)
            if numel:
                state[name] = Slot(storage(dtype, numel, inside, slot_named(name)), (numel,))
        state.update(self._scalars)
        numel = self._numel - padding
        return _Share(
            Slot(storage(self._master, numel, pieces, master_of), (numel,), requires_grad=True),
            state,
            padding,
            self._addresses(pieces),
        )

    def _pieces(self, rank: int) -> Iterator[Piece]:
        low, high = rank * self._numel, (rank + 1) * self._numel
        for number in range(bisect_right(self._stops, low), bisect_left(self._starts, high)):
            start, stop = max(self._starts[number], low), min(self._stops[number], high)
            begin = self._starts[number]
            yield piece(self._flat[number], start - begin, stop - begin, start - low)

    def _addresses(self, pieces: Sequence[Piece]) -> OrderedDict[str, Call]:
        """Where each parameter's fragment stands, in the user's order."""
        ordered = sorted(pieces, key=lambda held: self._order[held.member.fqn])
        return OrderedDict(
            (self._listed(held.member.fqn), address(held.numel, held.offset)) for held in ordered
        )


def _keeps_matrices(choice: Choice, group: TrainedGroup) -> bool:
    """Return whether each rank keeps whole momenta of the parameters that its partition meets.

    DeepSpeed 0.19.8 ``stage_1_and_2.py`` (``_muon_momentum_buffer``); neither with an offloaded
    optimizer (``_apply_muon_updates_cpu_offload``) nor in ``bf16_optimizer.py``.
    """
    offloads = order.section(order.section(choice.config, "zero_optimization"), "offload_optimizer")
    return (
        group.hyper.get("use_muon") is True
        and offloads.get("device", "none") == "none"
        and not order.uses_bf16_optimizer(choice.config, choice.stage, choice.precision)
    )


def _whole_members(pieces: Sequence[Piece]) -> tuple[int, list[Piece]]:
    """Return the members that a partition meets, whole and one after the other."""
    at, found = 0, []
    for held in pieces:
        numel = prod(held.member.weight.shape)
        found.append(piece(held.member, 0, numel, at))
        at += numel
    return at, found


def _paddings(flat: Sequence[TrainedParameter], unit: int) -> list[int]:
    """The padding after each parameter: the next begins at a multiple of ``unit``."""
    return [-prod(member.weight.shape) % unit for member in flat[:-1]] + [0] * bool(flat)


def _alignment(choice: Choice, flat: Sequence[TrainedParameter]) -> int:
    """In elements of the module's dtype."""
    config = choice.config
    asked = order.section(config, "zero_optimization").get("parameter_alignment") is True
    if not asked or not flat or order.uses_bf16_optimizer(config, choice.stage, choice.precision):
        return 1
    _, dtype = choice.stored(flat[0].weight)
    return _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, dtype.itemsize)
