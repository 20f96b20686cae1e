"""Lay out ZeRO stages 1 and 2, and BF16_Optimizer: the optimizer states of every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import Any

from reshard.formats.deepspeed import flat_order
from reshard.formats.deepspeed.flat_groups import MAPPINGS, FlatGroup, Run
from reshard.formats.deepspeed.write.flat_tensors import (
    MemberRun,
    build_flat_tensor,
    choose_master_dtype,
    collect_slot_dtypes,
    cut_run,
    find_common_step,
    get_master,
    make_scalars,
    pick_slot,
)
from reshard.formats.deepspeed.write.pickled_objects import (
    WRITTEN_AS,
    make_fragment_address,
    make_scaler_object,
    make_stage_enum,
    make_step_state,
)
from reshard.formats.deepspeed.write.spec import OutputSpec
from reshard.state_dict.optimizers import nested_slots
from reshard.training.state import TrainedGroup, TrainedParameter

_ALIGNED_BYTES = 16  # parameter_alignment: where every parameter of the module begins
_NUMBERS = ("group_paddings", "param_alignment_paddings", "partition_count")


def make_rank_states(
    spec: OutputSpec, ranks: Iterable[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each rank and its ``optimizer_state_dict``; the flat tensors are laid out once."""
    groups = [
        _WrittenGroup(spec, group, flat)
        for group, flat in zip(spec.groups, spec.flats, strict=True)
    ]
    param_groups = spec.build_param_groups()
    for rank in ranks:
        cuts = [
            written.cut_partition(spec.locate_partition(written.group, rank)) for written in groups
        ]
        states = {number: cut["state"] for number, cut in enumerate(cuts) if cut["state"]}
        yield (
            rank,
            {
                "loss_scaler": make_scaler_object(spec.scaler),
                "dynamic_loss_scale": spec.scaler["dynamic"],
                "overflow": False,
                **({} if spec.clip is None else {"clip_grad": spec.clip}),  # else the new run's own
                "base_optimizer_state": {"state": states, "param_groups": param_groups},
                "single_partition_of_fp32_groups": [cut["master"] for cut in cuts],
                "zero_stage": make_stage_enum(spec.stage),
                **{key: [cut[key] for cut in cuts] for key in _NUMBERS},
                "ds_version": WRITTEN_AS,
                MAPPINGS: [cut[MAPPINGS] for cut in cuts],
            },
        )


class _WrittenGroup:
    def __init__(
        self, spec: OutputSpec, group: TrainedGroup, members: Sequence[TrainedParameter]
    ) -> None:
        self._spec = spec
        self.group = group
        self._members = {member.fqn: member for member in members}
        self._order = {fqn: number for number, fqn in enumerate(group.fqns)}
        shapes = {member.fqn: member.weight.shape for member in members}
        unit = _find_alignment(spec, members)
        # DeepSpeed adds the padding after the last parameter to the tail of the group.
        paddings = tuple(-prod(shape) % unit for shape in [*shapes.values()][:-1])
        paddings += (0,) * bool(shapes)
        self._flat = FlatGroup(shapes, spec.count_partitions(group), paddings)
        self._keeps_whole = _keeps_whole_momenta(spec, group)
        self._master = choose_master_dtype(members)
        self._dtypes = collect_slot_dtypes(members)
        self._scalars = make_scalars(members)
        self._step = find_common_step(spec.state, group, members)

    def cut_partition(self, position: int) -> dict[str, Any]:
        """Return ``master``, ``state`` (empty if never stepped), and what the file states."""
        flat = self._flat
        runs, numel = self._cut(flat.runs[position]), flat.numel
        stored = flat.count_stored(position)
        master = build_flat_tensor(self._master, stored, runs, get_master, grad=True)
        state = make_step_state(self._step, self.group.hyper, self._dtypes)
        if self._keeps_whole:
            runs, numel = self._cut(flat.whole_runs[position]), flat.count_whole(position)
        for name, dtype in self._dtypes.items() if numel else ():
            state[name] = build_flat_tensor(dtype, numel, runs, pick_slot(name))
        state = nested_slots.unflatten({**state, **self._scalars})
        stated = flat.derive(position)
        # The positions of fragments, in the user's order.
        addresses = OrderedDict(
            (self._spec.get_listed_name(fqn), make_fragment_address(*stated[MAPPINGS][fqn]))
            for fqn in sorted(stated[MAPPINGS], key=self._order.__getitem__)
        )
        return {**stated, MAPPINGS: addresses, "master": master, "state": state}

    def _cut(self, runs: Iterable[Run]) -> list[MemberRun]:
        return [cut_run(self._members[fqn], start, stop, at) for fqn, start, stop, at in runs]


def _keeps_whole_momenta(spec: OutputSpec, group: TrainedGroup) -> bool:
    # DeepSpeed 0.19.8 ``stage_1_and_2.py`` (``_muon_momentum_buffer``). An offloaded optimizer
    # (``_apply_muon_updates_cpu_offload``) and ``bf16_optimizer.py`` keep equal partitions.
    offloads = flat_order.get_section(flat_order.get_zero_section(spec.config), "offload_optimizer")
    return (
        group.hyper.get("use_muon") is True
        and offloads.get("device", "none") == "none"
        and not flat_order.uses_bf16_optimizer(spec.config, spec.stage, spec.precision)
    )


def _find_alignment(spec: OutputSpec, flat: Sequence[TrainedParameter]) -> int:
    is_aligned = flat_order.get_zero_section(spec.config).get("parameter_alignment") is True
    uses_bf16 = flat_order.uses_bf16_optimizer(spec.config, spec.stage, spec.precision)
    if not is_aligned or not flat or uses_bf16:
        return 1
    _, dtype = spec.stored(flat[0].weight)
    return _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, dtype.itemsize)
