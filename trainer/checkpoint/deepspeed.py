"""Write DeepSpeed's checkpoint directory: the names and the content of its files.

Layout: deepspeed/runtime/engine.py (save_checkpoint), runtime/zero/stage_1_and_2.py and stage3.py
(state_dict), 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import foreign
from trainer.checkpoint.contents import Content, Nothing, TorchFile
from trainer.core.optimizer import make_hyperparameters
from trainer.core.partition import Partition
from trainer.core.schedule import compute_learning_rate
from trainer.core.settings import CoreSettings
from trainer.core.zero import ZeroEngine
from trainer.core.zero3 import Zero3Engine

WRITTEN_AS = "0.19.8"
"""The DeepSpeed version whose layout these files have."""
MODEL = "mp_rank_00_model_states.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Fields of `FlatState`, which have the same names in the files."""


def name_model_file(stage: int, rank: int) -> str:
    """Return the name of the model file: one for all ranks; in stage 3, one for each rank."""
    return f"zero_pp_rank_{rank}_{MODEL}" if stage == 3 else MODEL


def name_optimizer_file(precision: str, rank: int) -> str:
    """Return the name of a rank's optimizer file, in stages 1 to 3."""
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def collect(engine: ZeroEngine, progress: dict[str, Any]) -> Iterator[Content]:
    """Yield this rank's files.

    Args:
        engine: the engine of any ZeRO stage.
        progress: the fields of `Progress`.
    """
    stage, rank = engine.settings.zero_stage, engine.ranks.rank
    if rank == 0 or stage == 3:
        states = _make_model_states(engine, progress)
        yield TorchFile(name_model_file(stage, rank), states, foreign)
    else:
        yield Nothing()
    if stage:
        states = {
            "optimizer_state_dict": _make_optimizer_states(engine, progress),
            "ds_config": make_basic_config(engine.settings),
            "ds_version": WRITTEN_AS,
        }
        name = name_optimizer_file(engine.settings.precision, rank)
        yield TorchFile(name, states, foreign)


def _make_model_states(engine: ZeroEngine, progress: dict[str, Any]) -> dict[str, Any]:
    settings, world = engine.settings, engine.ranks.world
    stage = settings.zero_stage
    parameters = dict(engine.model.named_parameters(remove_duplicate=False))
    module = engine.model.state_dict()
    if stage == 3:
        empty = {name: torch.empty(0, dtype=p.dtype) for name, p in parameters.items()}
        module = OrderedDict((name, empty.get(name, value)) for name, value in module.items())
    frozen = [(n, p) for n, p in engine.model.named_parameters() if not p.requires_grad]
    # As DeepSpeed does: stage 1 writes no frozen parameters, stage 0 no shapes at all.
    has_frozen = stage >= 2
    scheduled = settings.schedule != "constant"
    return {
        "module": module,
        "buffer_names": [name for name in module if name not in parameters],
        "optimizer": _make_stage_0_optimizer(engine, progress) if stage == 0 else None,
        "param_shapes": _list_param_shapes(engine) if stage else None,
        "frozen_param_shapes": OrderedDict((n, p.shape) for n, p in frozen) if has_frozen else None,
        "shared_params": _map_shared_names(engine) if stage else None,
        "frozen_param_fragments": _list_frozen_fragments(engine) if has_frozen else None,
        "lr_scheduler": {"last_batch_iteration": progress["updates"] - 1} if scheduled else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": progress["skipped"],
        "global_steps": progress["step"],
        "global_samples": progress["samples"],
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": make_basic_config(engine.settings),
        "ds_version": WRITTEN_AS,
    }


def _list_frozen_fragments(engine: ZeroEngine) -> dict[str, Tensor]:
    """Return what this rank keeps of each frozen parameter: in stage 3, its padded piece."""
    frozen = {n: p.detach() for n, p in engine.model.named_parameters() if not p.requires_grad}
    if not isinstance(engine, Zero3Engine):
        return frozen
    return {
        member.name: unit.shard[member.offset : member.offset + member.piece]
        for unit in engine.units
        for member in unit.members
        if member.name in frozen
    }


def _list_param_shapes(engine: ZeroEngine) -> list[OrderedDict[str, torch.Size]]:
    partition = engine.shard.partition
    return [
        OrderedDict((name, torch.Size(partition.shapes[name])) for name in flat.names)
        for flat in partition.flats
    ]


def _map_shared_names(engine: ZeroEngine) -> dict[str, str]:
    saved_names = {parameter: name for name, parameter in engine.model.named_parameters()}
    every = engine.model.named_parameters(remove_duplicate=False)
    return {name: saved_names[p] for name, p in every if saved_names[p] != name}


def _make_optimizer_states(engine: ZeroEngine, progress: dict[str, Any]) -> dict[str, Any]:
    stage, shard = engine.settings.zero_stage, engine.shard
    masters = [state.master for state in shard.states]
    base = {
        "state": {
            index: {"step": state.step, **{name: getattr(state, name) for name in MOMENTS}}
            for index, state in enumerate(shard.states)
        },
        "param_groups": _make_param_groups(
            engine, progress, [[i] for i in range(len(engine.groups))]
        ),
    }
    common = {
        "loss_scaler": foreign.make_scaler_object(engine.scaler),
        "dynamic_loss_scale": engine.scaler.dynamic,
        "overflow": False,
    }
    if stage == 3:
        base["param_groups"] = _make_param_groups(
            engine, progress, _list_sub_groups(shard.partition)
        )
        return {
            "zero_stage": foreign.ZeroStage(stage),
            **common,
            "partition_count": engine.ranks.world,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    flats, rank = shard.partition.flats, engine.ranks.rank
    return {
        **common,
        "clip_grad": engine.settings.clip,
        "base_optimizer_state": base,
        # DeepSpeed saves masters without the padding at the end, and moments with it.
        "single_partition_of_fp32_groups": [
            master[: flat.piece_numel - flat.paddings[rank]]
            for master, flat in zip(masters, flats, strict=True)
        ],
        "zero_stage": foreign.ZeroStage(stage),
        "group_paddings": [flat.paddings[rank] for flat in flats],
        "param_alignment_paddings": [[0] * len(flat.names) for flat in flats],
        "partition_count": [engine.ranks.world] * len(flats),
        "ds_version": WRITTEN_AS,
        "param_slice_mappings": _make_slice_mappings(shard.partition, rank),
    }


def _make_slice_mappings(
    partition: Partition, rank: int
) -> list[OrderedDict[str, foreign.StandIn]]:
    mappings: list[OrderedDict[str, foreign.StandIn]] = [OrderedDict() for _ in partition.flats]
    for run in partition.runs_of_rank(rank):
        address = foreign.FragmentAddress(numel=run.numel, start=run.offset)
        mappings[run.flat][run.name] = address
    return mappings


def _list_sub_groups(partition: Partition) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, flat in enumerate(partition.flats):
        groups.setdefault(flat.group, []).append(index)
    return list(groups.values())


def _make_param_groups(
    engine: ZeroEngine, progress: dict[str, Any], members: list[list[int]]
) -> list[dict[str, Any]]:
    """Return torch's ``param_groups``, with the learning rate of the next update."""
    lr = compute_learning_rate(engine.settings, progress["updates"])
    return [
        {**make_hyperparameters(engine.settings, group.weight_decay, lr), "params": params}
        for group, params in zip(engine.groups, members, strict=True)
    ]


def _make_stage_0_optimizer(engine: ZeroEngine, progress: dict[str, Any]) -> dict[str, Any]:
    """Return the state by parameter: torch's dict, in 16 bits inside that of the fp32 wrapper."""
    state: dict[int, dict[str, Tensor]] = {}
    masters, members = [], []
    for group in engine.groups:
        first = len(state)
        for name in group.names:
            slots = {key: _get_whole(engine, name, key) for key in MOMENTS}
            step = engine.shard.states[0].step.clone()  # torch increments each in place
            state[len(state)] = {"step": step, **slots}
        masters.append([_get_whole(engine, name, "master") for name in group.names])
        members.append(list(range(first, len(state))))
    base = {"state": state, "param_groups": _make_param_groups(engine, progress, members)}
    if engine.settings.precision == "fp32":
        return base
    scaler = engine.scaler
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


def _get_whole(engine: ZeroEngine, name: str, key: str) -> Tensor:
    """Return a parameter's master or moment, all of which this rank has."""
    shape = engine.shard.partition.shapes[name]
    runs = engine.shard.partition.runs[name]
    if not runs:
        return torch.empty(shape)
    slot = getattr(engine.shard.states[runs[0].flat], key)
    piece: Tensor = slot[runs[0].offset : runs[0].offset + runs[0].numel]
    return piece.view(shape)


def make_basic_config(settings: CoreSettings) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that readers of its checkpoints need."""
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
