"""Lay out ZeRO stages 1 and 2, and BF16_Optimizer: the optimizer states of every rank.

Geometry (DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py``, ``__init__``): a group's parameters
one after the other, each but the last followed by its alignment padding, then a tail that makes the
whole a multiple of twice the ranks that share it: all, or those that hold the same experts. Masters
are stored without the tail, slots with it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.containers.torch_writer import Slot
from reshard.formats.deepspeed import order
from reshard.formats.deepspeed.write.flat_tensors import (
    MemberRun,
    build_flat_tensor,
    choose_master_dtype,
    collect_slot_dtypes,
    concatenate,
    cut_run,
    find_common_step,
    get_master,
    make_scalars,
    pick_slot,
)
from reshard.formats.deepspeed.write.objects import (
    WRITTEN_AS,
    make_fragment_address,
    make_scaler_object,
    make_stage_enum,
    make_step_state,
)
from reshard.formats.deepspeed.write.spec import OutputSpec
from reshard.state_dict.optimizers import nested_slots
from reshard.training.state import TrainedGroup, TrainedParameter

ALIGNMENT = 2  # nccl_start_alignment_factor
_ALIGNED_BYTES = 16  # parameter_alignment: where every parameter of the module begins


def make_rank_states(
    spec: OutputSpec, ranks: Iterable[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each rank and its ``optimizer_state_dict``; the flat tensors are laid out once."""
    groups = [
        _WrittenGroup(spec, group, flat)
        for group, flat in zip(spec.groups, spec.flats, strict=True)
    ]
    for rank in ranks:
        partitions = [
            flat.cut_partition(spec.locate_partition(group, rank))
            for group, flat in zip(spec.groups, groups, strict=True)
        ]
        yield (
            rank,
            {
                "loss_scaler": make_scaler_object(spec.scaler),
                "dynamic_loss_scale": spec.scaler["dynamic"],
                "overflow": False,
                **({} if spec.clip is None else {"clip_grad": spec.clip}),  # else the new run's own
                "base_optimizer_state": {
                    "state": {number: p.state for number, p in enumerate(partitions) if p.state},
                    "param_groups": spec.build_param_groups(),
                },
                "single_partition_of_fp32_groups": [partition.master for partition in partitions],
                "zero_stage": make_stage_enum(spec.stage),
                "group_paddings": [partition.padding for partition in partitions],
                "param_alignment_paddings": [list(flat.paddings) for flat in groups],
                "partition_count": [spec.count_partitions(group) for group in spec.groups],
                "ds_version": WRITTEN_AS,
                "param_slice_mappings": [partition.addresses for partition in partitions],
            },
        )


@dataclass(frozen=True, slots=True)
class _WrittenPartition:
    """What one rank holds of a group; ``state`` is empty if the group was never stepped."""

    master: Slot
    state: dict[str, Any]
    padding: int
    addresses: OrderedDict[str, Call]


class _WrittenGroup:
    """One group's flat tensor, its members in flat order."""

    def __init__(
        self, spec: OutputSpec, group: TrainedGroup, flat: Sequence[TrainedParameter]
    ) -> None:
        self._spec = spec
        self._group = group
        self._flat = flat
        self._order = {fqn: number for number, fqn in enumerate(group.fqns)}
        unit = _find_alignment(spec, flat)
        sizes = [prod(member.weight.shape) for member in flat]
        # DeepSpeed adds the padding after the last parameter to the tail of the group.
        self.paddings = [-numel % unit for numel in sizes[:-1]] + [0] * bool(flat)
        ends = accumulate(map(sum, zip(sizes, self.paddings, strict=True)), initial=0)
        self._starts = list(ends)[: len(flat)]
        self._stops = [start + numel for start, numel in zip(self._starts, sizes, strict=True)]
        self._end = self._stops[-1] if flat else 0
        self._numel = -(-self._end // (ALIGNMENT * spec.count_partitions(group))) * ALIGNMENT
        self._master = choose_master_dtype(flat)
        self._dtypes = collect_slot_dtypes(flat)
        self._scalars = make_scalars(flat)
        self._step = find_common_step(flat, group.hyper, spec.state.manifest.origin.path)

    def cut_partition(self, position: int) -> _WrittenPartition:
        """Return what one rank holds, by its position among the ranks that share the group."""
        runs = list(self._cut_runs(position))
        padding = min(max((position + 1) * self._numel - self._end, 0), self._numel)
        state = make_step_state(self._step, self._group.hyper, self._dtypes)
        inside, numel = runs, self._numel
        if _keeps_whole_momenta(self._spec, self._group):
            inside, numel = concatenate(run.member for run in runs)
        for name, dtype in self._dtypes.items() if numel else ():
            state[name] = build_flat_tensor(dtype, numel, inside, pick_slot(name))
        state = nested_slots.unflatten({**state, **self._scalars})
        stored = self._numel - padding
        master = build_flat_tensor(self._master, stored, runs, get_master, grad=True)
        return _WrittenPartition(master, state, padding, self._list_addresses(runs))

    def _cut_runs(self, position: int) -> Iterator[MemberRun]:
        low, high = position * self._numel, (position + 1) * self._numel
        for number in range(bisect_right(self._stops, low), bisect_left(self._starts, high)):
            start, stop = max(self._starts[number], low), min(self._stops[number], high)
            begin = self._starts[number]
            yield cut_run(self._flat[number], start - begin, stop - begin, start - low)

    def _list_addresses(self, runs: Sequence[MemberRun]) -> OrderedDict[str, Call]:
        """Return the position of each parameter's fragment, in the user's order."""
        ordered = sorted(runs, key=lambda run: self._order[run.member.fqn])
        return OrderedDict(
            (
                self._spec.get_listed_name(run.member.fqn),
                make_fragment_address(run.numel, run.offset),
            )
            for run in ordered
        )


def _keeps_whole_momenta(spec: OutputSpec, group: TrainedGroup) -> bool:
    """Return whether each rank keeps whole momenta of the parameters that its partition meets.

    DeepSpeed 0.19.8 ``stage_1_and_2.py`` (``_muon_momentum_buffer``). An offloaded optimizer
    (``_apply_muon_updates_cpu_offload``) and ``bf16_optimizer.py`` keep equal partitions.
    """
    offloads = order.get_section(order.get_zero_section(spec.config), "offload_optimizer")
    return (
        group.hyper.get("use_muon") is True
        and offloads.get("device", "none") == "none"
        and not order.uses_bf16_optimizer(spec.config, spec.stage, spec.precision)
    )


def _find_alignment(spec: OutputSpec, flat: Sequence[TrainedParameter]) -> int:
    """Return the unit at whose multiples parameters begin, in elements of the module's dtype."""
    is_aligned = order.get_zero_section(spec.config).get("parameter_alignment") is True
    uses_bf16 = order.uses_bf16_optimizer(spec.config, spec.stage, spec.precision)
    if not is_aligned or not flat or uses_bf16:
        return 1
    _, dtype = spec.stored(flat[0].weight)
    return _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, dtype.itemsize)
