"""Find the parameters, masters and optimizer slots in the memory of a rank, by names.

Each library has its own way from a parameter to the part of it that a rank has:

    torch, DDP       the parameter, and ``optimizer.state[parameter]``
    FSDP 2, TP       the same, as DTensors, which state their blocks
    FSDP 1           the flat parameter of each unit, and the runs of its members in it
    ZeRO 1 and 2     a view of its group's flat tensor, and a run in the partition of its master
    ZeRO 3           ``parameter.ds_tensor``, and a run in the flat partition of a sub-group
    16-bit stage 0   the flat master of a group, or a master for each parameter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from reshard.core.box import Box, Index, run_boxes, whole
from reshard.core.manifest import MASTER, PARAM
from reshard.live.comparison import Loaded, LoadedBlock, NotCompared, WithoutState
from reshard.live.names import get_live_name
from reshard.state_dict.optimizers import nested_slots

_STEP = "step"
_AVAILABLE = "AVAILABLE"  # DeepSpeed's states of a parameter and of its partition


@dataclass(frozen=True, slots=True)
class _FlatRun:
    """Elements of a parameter from ``start`` on, which are at ``offset`` of a flat tensor."""

    fqn: str
    shape: Index
    start: int
    offset: int
    numel: int

    def move_to(self, offset: int) -> _FlatRun:
        return replace(self, offset=offset)

    def cut(self, kind: str, flat: Tensor) -> Iterator[Loaded]:
        at, values = self.offset, flat.detach().view(-1)
        for box in run_boxes(self.shape, self.start, self.start + self.numel):
            yield LoadedBlock(self.fqn, kind, self.shape, box, values[at : at + box.volume])
            at += box.volume

    def cut_slots(self, flat: Tensor, state: Mapping[str, Any]) -> Iterator[Loaded]:
        slots = _select_slots(state)
        if not slots and self.numel:
            yield WithoutState(self.fqn)
        for slot, values in slots.items():
            if values.numel() == flat.numel():
                yield from self.cut(slot, values)
            elif values.dim():
                yield NotCompared(slot, "it does not have a value for each element")


def _select_slots(state: Mapping[str, Any]) -> dict[str, Tensor]:
    flat = nested_slots.flatten(state, torch.is_tensor)
    return {name: value for name, value in flat.items() if torch.is_tensor(value) and name != _STEP}


# torch


def iterate_model(model: nn.Module) -> Iterator[Loaded]:
    """Yield this rank's part of each parameter of a model."""
    units = list(_iterate_units(model))
    flat = {id(parameter) for unit in units for parameter in unit.list_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in flat:
            yield from _locate(get_live_name(name), PARAM, parameter)
    for unit in units:
        for _, run in unit.list_members():
            yield from run.cut(PARAM, unit.flat)


def iterate_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loaded]:
    """Yield this rank's part of each slot of the parameters of a model."""
    names = {parameter: get_live_name(name) for name, parameter in model.named_parameters()}
    runs: dict[Any, list[_FlatRun]] = {}
    for unit in _iterate_units(model):
        members = unit.list_members()
        runs[unit.flat] = [run for _, run in members]
        # With ``use_orig_params``, the state of a member has its run alone.
        runs.update(
            (parameter, [run.move_to(0)]) for parameter, run in members if parameter is not None
        )
    for parameter in (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ):
        state = optimizer.state.get(parameter, {})
        if parameter in runs:
            for run in runs[parameter]:
                yield from run.cut_slots(parameter, state)
        elif parameter in names:
            yield from _locate_slots(names[parameter], parameter, state)


def _locate_slots(fqn: str, parameter: Any, state: Mapping[str, Any]) -> Iterator[Loaded]:
    slots = _select_slots(state)
    if not slots and parameter.numel():
        yield WithoutState(fqn)
    for slot, values in slots.items():
        yield from _locate(fqn, slot, values)


def iterate_state_dict(tensors: Mapping[str, Any]) -> Iterator[Loaded]:
    """Yield this rank's part of each tensor of a flat state dict; every key counts as a weight."""
    for key, tensor in tensors.items():
        if torch.is_tensor(tensor):
            yield from _locate(key, PARAM, tensor)


def _locate(fqn: str, kind: str, tensor: Any) -> Iterator[Loaded]:
    shape = tuple(tensor.size())
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        for chunk in tensor.__create_chunk_list__():
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            yield LoadedBlock(fqn, kind, shape, box, local)
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
            yield LoadedBlock(fqn, kind, tuple(tensor.size()), box, shard.tensor)
    elif type(tensor) in (Tensor, nn.Parameter):
        yield LoadedBlock(fqn, kind, shape, whole(shape), tensor)
    else:
        yield NotCompared(kind, f"its type in memory is {type(tensor).__name__}")


# FSDP 1: torch 2.13 ``torch/distributed/fsdp/_flat_param.py``, ``FlatParameter``


@dataclass(frozen=True, slots=True)
class _FlattenedModule:
    prefix: str
    flat: Any

    def list_parameters(self) -> list[Any]:
        """Return the flat parameter, and the views that ``use_orig_params`` makes of it."""
        return [self.flat, *(self.flat._params or ()), *(self.flat._shared_params or ())]  # noqa: SLF001 - no public names, here and below

    def list_members(self) -> list[tuple[Any, _FlatRun]]:
        """Return the runs that this rank has; with ``use_orig_params``, also their parameters."""
        flat = self.flat
        parameters = flat._params or [None] * len(flat._fqns)  # noqa: SLF001
        members = zip(flat._fqns, flat._shapes, parameters, flat._shard_param_infos, strict=True)  # noqa: SLF001
        return [
            (
                parameter,
                _FlatRun(
                    get_live_name(f"{self.prefix}.{fqn}" if self.prefix else fqn),
                    tuple(shape),
                    info.intra_param_start_idx,
                    info.offset_in_shard,
                    info.numel_in_shard,
                ),
            )
            for fqn, shape, parameter, info in members
            if info.in_shard
        ]


def _iterate_units(model: nn.Module) -> Iterator[_FlattenedModule]:
    for prefix, module in model.named_modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None:
            yield _FlattenedModule(prefix, flat)


# DeepSpeed 0.19.8: ``runtime/zero/``, ``runtime/fp16/``, ``runtime/bf16_optimizer.py``,
# ``utils/tensor_fragment.py``


def iterate_engine(
    engine: Any, *, has_weights: bool = True, has_masters: bool = True, has_slots: bool = True
) -> Iterator[Loaded]:
    """Yield this rank's part of each parameter, master and slot of a DeepSpeed engine.

    Args:
        has_weights: whether the weights were loaded as they are, and not by the program.
        has_masters, has_slots: whether they were loaded.
    """
    if engine.mp_world_size > 1:
        yield NotCompared("parameters", "model-parallel ranks may have parts of them")
        return
    fqns = _name_parameters(engine.module)
    for parameter, fqn in fqns.items() if has_weights else ():
        if hasattr(parameter, "ds_tensor"):
            yield from _cut_partition(fqn, parameter)
        else:
            yield from _locate(fqn, PARAM, parameter)
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if has_masters or has_slots:
        for flat, run in _iterate_flat(optimizer, fqns):
            yield from run.cut(MASTER, flat) if has_masters else ()
            yield from run.cut_slots(flat, inner.state.get(flat, {})) if has_slots else ()
        for master, parameter in _iterate_whole(optimizer, fqns):
            fqn = fqns[parameter]
            yield from _locate(fqn, MASTER, master) if has_masters else ()
            if has_slots:
                yield from _locate_slots(fqn, parameter, inner.state.get(master, {}))
        if _is_swapped(optimizer):
            yield NotCompared("masters and slots", "they are in swap files")


def _name_parameters(module: nn.Module) -> dict[Any, str]:
    from reshard.formats.deepspeed.experts.layout import parse_expert_name

    named: dict[Any, str] = {p: get_live_name(name) for name, p in module.named_parameters()}
    experts = {p: own for p, fqn in named.items() if (own := parse_expert_name(fqn)) is not None}
    counts = Counter(layer for layer, _ in {(own.layer, own.number) for own in experts.values()})
    for parameter, own in experts.items():
        from deepspeed.utils import groups

        rank = groups._get_expert_parallel_rank(parameter.group_name)  # noqa: SLF001 - no public name
        named[parameter] = str(own.renumber(own.number + rank * counts[own.layer]))
    return named


def _cut_partition(fqn: str, parameter: Any) -> Iterator[Loaded]:
    partition, shape = parameter.ds_tensor, tuple(parameter.ds_shape)
    if partition.status.name == _AVAILABLE:
        yield from _place_partition(fqn, parameter, 0).cut(PARAM, partition)
    else:
        yield NotCompared(PARAM, "it is in a swap file")
    if parameter.ds_status.name == _AVAILABLE:  # gathered, as small parameters are at all times
        yield LoadedBlock(fqn, PARAM, shape, whole(shape), parameter)


def _place_partition(fqn: str, parameter: Any, offset: int) -> _FlatRun:
    rank = torch.distributed.get_rank(group=parameter.ds_process_group)
    shape, size = tuple(parameter.ds_shape), parameter.partition_numel()
    start = min(rank * size, prod(shape))
    return _FlatRun(fqn, shape, start, offset, min(size, prod(shape) - start))


def _is_swapped(optimizer: Any, number: int | None = None) -> bool:
    """Return whether a sub-group of stage 3 is in swap files; without a number, whether one is."""
    groups = getattr(optimizer, "fp32_partitioned_groups_flat", ())
    numbers = range(len(groups)) if number is None else [number]
    return bool(groups) and any(map(optimizer._swappable_optimizer_subgroup, numbers))  # noqa: SLF001


def _iterate_flat(optimizer: Any, fqns: Mapping[Any, str]) -> Iterator[tuple[Any, _FlatRun]]:
    if hasattr(optimizer, "grad_position"):  # stage 3
        for parameter, fqn in fqns.items():
            place = optimizer.grad_position.get(getattr(parameter, "ds_id", None))
            if place is not None and not _is_swapped(optimizer, place[0]):
                flat = optimizer.fp32_partitioned_groups_flat[place[0]]
                yield flat, _place_partition(fqn, parameter, place[1])
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            ends = accumulate(parameter.numel() for parameter in group)
            for parameter, end in zip(group, ends, strict=True):
                size = parameter.numel()
                if parameter in fqns:
                    yield (
                        flat,
                        _FlatRun(fqns[parameter], tuple(parameter.shape), 0, end - size, size),
                    )
    else:
        yield from _iterate_partitions(optimizer, fqns)


def _iterate_partitions(optimizer: Any, fqns: Mapping[Any, str]) -> Iterator[tuple[Any, _FlatRun]]:
    # Each parameter is a view of its group's flat tensor, which has the order of the partitions.
    # DeepSpeed's own ``_hp_mapping`` has another one under ``round_robin_gradients``.
    names = ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition")  # BF16_Optimizer
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        names = ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups")
    parts = (getattr(optimizer, name, ()) for name in names)
    for number, (group, flat, partition) in enumerate(zip(*parts, strict=True)):
        rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[number])
        first = rank * partition.numel()
        for parameter in (p for p in group if p in fqns):
            at = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            start = max(at, first)
            numel = min(at + parameter.numel(), first + partition.numel()) - start
            if numel > 0:
                shape = tuple(parameter.shape)
                yield partition, _FlatRun(fqns[parameter], shape, start - at, start - first, numel)


def _iterate_whole(optimizer: Any, fqns: Mapping[Any, str]) -> Iterator[tuple[Any, Any]]:
    pairs: Iterable[tuple[Any, Any]] = ()
    if hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        pairs = zip(chain(*optimizer.fp32_groups), chain(*optimizer.fp16_groups), strict=True)
    elif isinstance(optimizer, torch.optim.Optimizer):
        pairs = ((p, p) for group in optimizer.param_groups for p in group["params"])
    yield from ((master, parameter) for master, parameter in pairs if parameter in fqns)
