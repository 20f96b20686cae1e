"""DeepSpeed's checkpoint directory: the names of its files, and what is written into them.

Layout: deepspeed/runtime/engine.py (save_checkpoint), runtime/zero/stage_1_and_2.py and stage3.py
(state_dict), 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files, foreign
from trainer.optimizer import hyperparameters
from trainer.schedule import learning_rate
from trainer.settings import Settings
from trainer.zero.partition import Partition
from trainer.zero.shard import STATE
from trainer.zero.state import ZeroState

WRITTEN_AS = "0.19.8"
"""The DeepSpeed version whose layout these files have."""
MODEL = "mp_rank_00_model_states.pt"


def model_file(stage: int, rank: int) -> str:
    """One for all ranks, or one a rank in stage 3."""
    return f"zero_pp_rank_{rank}_{MODEL}" if stage == 3 else MODEL


def optimizer_file(precision: str, rank: int) -> str:
    """One a rank, stages 1 to 3."""
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(directory: Path, held: ZeroState, progress: dict[str, Any]) -> None:
    """Write this rank's files.

    Args:
        progress: see ``Engine.save``.
    """
    stage, rank = held.settings.zero_stage, held.ranks.rank
    if rank == 0 or stage == 3:
        states = _model_states(held, progress)
        files.save(states, directory / model_file(stage, rank), pickle_module=foreign)
    if stage:
        states = {
            "optimizer_state_dict": _optimizer_states(held, progress),
            "ds_config": basic_config(held.settings),
            "ds_version": WRITTEN_AS,
        }
        name = optimizer_file(held.settings.precision, rank)
        files.save(states, directory / name, pickle_module=foreign)


def _model_states(held: ZeroState, progress: dict[str, Any]) -> dict[str, Any]:
    settings, world = held.settings, held.ranks.world
    stage = settings.zero_stage
    parameters = dict(held.model.named_parameters(remove_duplicate=False))
    module = held.model.state_dict()
    if stage == 3:
        empty = {name: torch.empty(0, dtype=p.dtype) for name, p in parameters.items()}
        module = OrderedDict((name, empty.get(name, value)) for name, value in module.items())
    frozen = [(n, p) for n, p in held.model.named_parameters() if not p.requires_grad]
    # As there: stage 1 says nothing of frozen parameters, stage 0 nothing of shapes at all.
    tell_frozen = stage >= 2
    scheduled = settings.schedule != "constant"
    return {
        "module": module,
        "buffer_names": [name for name in module if name not in parameters],
        "optimizer": _stage_0_optimizer(held, progress) if stage == 0 else None,
        "param_shapes": _param_shapes(held) if stage else None,
        "frozen_param_shapes": OrderedDict((n, p.shape) for n, p in frozen)
        if tell_frozen
        else None,
        "shared_params": _shared(held) if stage else None,
        "frozen_param_fragments": held.frozen_fragments() if tell_frozen else None,
        "lr_scheduler": {"last_batch_iteration": progress["updates"] - 1} if scheduled else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": progress["skipped"],
        "global_steps": progress["step"],
        "global_samples": progress["samples"],
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": basic_config(held.settings),
        "ds_version": WRITTEN_AS,
    }


def _param_shapes(held: ZeroState) -> list[OrderedDict[str, torch.Size]]:
    partition = held.shard.partition
    return [
        OrderedDict((name, torch.Size(partition.shapes[name])) for name in flat.names)
        for flat in partition.flats
    ]


def _shared(held: ZeroState) -> dict[str, str]:
    """Alias -> the name under which a tied parameter is kept."""
    kept = {parameter: name for name, parameter in held.model.named_parameters()}
    every = held.model.named_parameters(remove_duplicate=False)
    return {name: kept[parameter] for name, parameter in every if kept[parameter] != name}


def _optimizer_states(held: ZeroState, progress: dict[str, Any]) -> dict[str, Any]:
    """``optimizer_state_dict`` of this rank's file."""
    stage, shard = held.settings.zero_stage, held.shard
    masters = [state.master.get() for state in shard.states]
    base = {
        "state": {
            index: {"step": state.step, **{name: getattr(state, name).get() for name in STATE}}
            for index, state in enumerate(shard.states)
        },
        "param_groups": _param_groups(held, progress, [[i] for i in range(len(held.groups))]),
    }
    common = {
        "loss_scaler": foreign.scaler_object(held.scaler),
        "dynamic_loss_scale": held.scaler.dynamic,
        "overflow": False,
    }
    if stage == 3:
        base["param_groups"] = _param_groups(held, progress, _sub_groups(shard.partition))
        return {
            "zero_stage": foreign.ZeroStage(stage),
            **common,
            "partition_count": held.ranks.world,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    flats, rank = shard.partition.flats, held.ranks.rank
    return {
        **common,
        "clip_grad": held.settings.clip,
        "base_optimizer_state": base,
        # Masters go without the padding at the end, moments with it.
        "single_partition_of_fp32_groups": [
            master[: flat.numel - flat.paddings[rank]]
            for master, flat in zip(masters, flats, strict=True)
        ],
        "zero_stage": foreign.ZeroStage(stage),
        "group_paddings": [flat.paddings[rank] for flat in flats],
        "param_alignment_paddings": [[0] * len(flat.names) for flat in flats],
        "partition_count": [held.ranks.world] * len(flats),
        "ds_version": WRITTEN_AS,
        "param_slice_mappings": _slice_mappings(shard.partition, rank),
    }


def _slice_mappings(partition: Partition, rank: int) -> list[OrderedDict[str, foreign.StandIn]]:
    mappings: list[OrderedDict[str, foreign.StandIn]] = [OrderedDict() for _ in partition.flats]
    for run in partition.of_rank(rank):
        address = foreign.FragmentAddress(numel=run.numel, start=run.offset)
        mappings[run.flat][run.name] = address
    return mappings


def _sub_groups(partition: Partition) -> list[list[int]]:
    """Flat tensors of each param group, by number."""
    groups: dict[int, list[int]] = {}
    for index, flat in enumerate(partition.flats):
        groups.setdefault(flat.group, []).append(index)
    return list(groups.values())


def _param_groups(
    held: ZeroState, progress: dict[str, Any], members: list[list[int]]
) -> list[dict[str, Any]]:
    """Torch's ``param_groups``, with the rate of the next update."""
    rate = learning_rate(held.settings, progress["updates"])
    return [
        {**hyperparameters(held.settings, group.weight_decay, rate), "params": params}
        for group, params in zip(held.groups, members, strict=True)
    ]


def _stage_0_optimizer(held: ZeroState, progress: dict[str, Any]) -> dict[str, Any]:
    """By parameter: torch's own dict in fp32, in 16 bits inside that of the fp32-master wrapper."""
    state: dict[int, dict[str, Tensor]] = {}
    masters, members = [], []
    for group in held.groups:
        first = len(state)
        for name in group.names:
            slots = {key: _whole(held, name, key) for key in STATE}
            step = held.shard.states[0].step.clone()  # torch counts up in place, so not one for all
            state[len(state)] = {"step": step, **slots}
        masters.append([_whole(held, name, "master") for name in group.names])
        members.append(list(range(first, len(state))))
    base = {"state": state, "param_groups": _param_groups(held, progress, members)}
    if held.settings.precision == "fp32":
        return base
    scaler = held.scaler
    wrapper: dict[str, Any] = {
        "dynamic_loss_scale": scaler.dynamic,
        "cur_scale": scaler.scale,
        "cur_iter": progress["step"],
    }
    if scaler.dynamic:
        wrapper |= {
            "last_overflow_iter": scaler.last_overflow,
            "scale_factor": 2.0,
            "scale_window": scaler.window,
        }
    return {**wrapper, "optimizer_state_dict": base, "fp32_groups": masters}


def _whole(held: ZeroState, name: str, key: str) -> Tensor:
    """A parameter's master or slot, where this rank has all of it."""
    shape = held.shard.partition.shapes[name]
    runs = held.shard.partition.runs[name]
    if not runs:
        return torch.empty(shape)
    slot = getattr(held.shard.states[runs[0].flat], key)
    piece: Tensor = slot.piece(runs[0].offset, runs[0].offset + runs[0].numel)
    return piece.view(shape)


def basic_config(settings: Settings) -> dict[str, Any]:
    """The run in DeepSpeed's words, as far as a reader of its checkpoint asks."""
    config: dict[str, Any] = {
        "train_batch_size": settings.global_batch,
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip,
        "zero_optimization": {"stage": settings.zero_stage},
    }
    if settings.precision != "fp32":
        config[settings.precision] = {"enabled": True}
    return config
