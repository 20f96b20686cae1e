"""DeepSpeed's checkpoint directory, written as it writes and read at any number of ranks.

Layout: deepspeed/runtime/engine.py (save_checkpoint), runtime/zero/stage_1_and_2.py and stage3.py
(state_dict), 0.19.8. What lies in a rank's flat tensors follows from ``param_shapes`` and the
number of ranks, so a reader rebuilds the writer's partition and copies what overlaps its own.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.checkpoint import files, foreign
from trainer.errors import CheckpointError
from trainer.optimizer import hyperparameters
from trainer.schedule import learning_rate
from trainer.zero.partition import Partition, Run, Shapes, by_parameter, contiguous
from trainer.zero.shard import STATE

if TYPE_CHECKING:
    from trainer.engines.zero import ZeroEngine

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


# Writing


def write(directory: Path, engine: ZeroEngine, progress: dict[str, Any]) -> None:
    """Write this rank's files.

    Args:
        progress: see ``Engine.save``.
    """
    stage, rank = engine.settings.zero_stage, engine.ranks.rank
    if rank == 0 or stage == 3:
        states = _model_states(engine, progress)
        files.save(states, directory / model_file(stage, rank), pickle_module=foreign)
    if stage:
        states = {
            "optimizer_state_dict": _optimizer_states(engine, progress),
            "ds_config": _ds_config(engine),
            "ds_version": WRITTEN_AS,
        }
        name = optimizer_file(engine.settings.precision, rank)
        files.save(states, directory / name, pickle_module=foreign)


def _model_states(engine: ZeroEngine, progress: dict[str, Any]) -> dict[str, Any]:
    settings, world = engine.settings, engine.ranks.world
    stage = settings.zero_stage
    parameters = dict(engine.model.named_parameters(remove_duplicate=False))
    module = engine.model.state_dict()
    if stage == 3:
        empty = {name: torch.empty(0, dtype=p.dtype) for name, p in parameters.items()}
        module = OrderedDict((name, empty.get(name, value)) for name, value in module.items())
    frozen = [(n, p) for n, p in engine.model.named_parameters() if not p.requires_grad]
    # As there: stage 1 says nothing of frozen parameters, stage 0 nothing of shapes at all.
    tell_frozen = stage >= 2
    scheduled = settings.schedule != "constant"
    return {
        "module": module,
        "buffer_names": [name for name in module if name not in parameters],
        "optimizer": _stage_0_optimizer(engine, progress) if stage == 0 else None,
        "param_shapes": _param_shapes(engine) if stage else None,
        "frozen_param_shapes": OrderedDict((n, p.shape) for n, p in frozen)
        if tell_frozen
        else None,
        "shared_params": _shared(engine) if stage else None,
        "frozen_param_fragments": engine.frozen_fragments() if tell_frozen else None,
        "lr_scheduler": {"last_batch_iteration": progress["updates"] - 1} if scheduled else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": progress["skipped"],
        "global_steps": progress["step"],
        "global_samples": progress["samples"],
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _ds_config(engine),
        "ds_version": WRITTEN_AS,
    }


def _param_shapes(engine: ZeroEngine) -> list[OrderedDict[str, torch.Size]]:
    partition = engine.shard.partition
    return [
        OrderedDict((name, torch.Size(partition.shapes[name])) for name in flat.names)
        for flat in partition.flats
    ]


def _shared(engine: ZeroEngine) -> dict[str, str]:
    """Alias -> the name under which a tied parameter is kept."""
    kept = {parameter: name for name, parameter in engine.model.named_parameters()}
    every = engine.model.named_parameters(remove_duplicate=False)
    return {name: kept[parameter] for name, parameter in every if kept[parameter] != name}


def _optimizer_states(engine: ZeroEngine, progress: dict[str, Any]) -> dict[str, Any]:
    """``optimizer_state_dict`` of this rank's file."""
    stage, shard = engine.settings.zero_stage, engine.shard
    masters = [state.master.get() for state in shard.states]
    base = {
        "state": {
            index: {"step": state.step, **{name: getattr(state, name).get() for name in STATE}}
            for index, state in enumerate(shard.states)
        },
        "param_groups": _param_groups(engine, progress, [[i] for i in range(len(engine.groups))]),
    }
    common = {
        "loss_scaler": foreign.scaler_object(engine.scaler),
        "dynamic_loss_scale": engine.scaler.dynamic,
        "overflow": False,
    }
    if stage == 3:
        base["param_groups"] = _param_groups(engine, progress, _sub_groups(shard.partition))
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
        # Masters go without the padding at the end, moments with it.
        "single_partition_of_fp32_groups": [
            master[: flat.numel - flat.paddings[rank]]
            for master, flat in zip(masters, flats, strict=True)
        ],
        "zero_stage": foreign.ZeroStage(stage),
        "group_paddings": [flat.paddings[rank] for flat in flats],
        "param_alignment_paddings": [[0] * len(flat.names) for flat in flats],
        "partition_count": [engine.ranks.world] * len(flats),
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
    engine: ZeroEngine, progress: dict[str, Any], members: list[list[int]]
) -> list[dict[str, Any]]:
    """Torch's ``param_groups``, with the rate of the next update."""
    rate = learning_rate(engine.settings, progress["updates"])
    return [
        {**hyperparameters(engine.settings, group.weight_decay, rate), "params": params}
        for group, params in zip(engine.groups, members, strict=True)
    ]


def _stage_0_optimizer(engine: ZeroEngine, progress: dict[str, Any]) -> dict[str, Any]:
    """By parameter: torch's own dict in fp32, in 16 bits inside that of the fp32-master wrapper."""
    state: dict[int, dict[str, Tensor]] = {}
    masters, members = [], []
    for group in engine.groups:
        first = len(state)
        for name in group.names:
            slots = {key: _whole(engine, name, key) for key in STATE}
            state[len(state)] = {"step": engine.shard.states[0].step, **slots}
        masters.append([_whole(engine, name, "master") for name in group.names])
        members.append(list(range(first, len(state))))
    base = {"state": state, "param_groups": _param_groups(engine, progress, members)}
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


def _whole(engine: ZeroEngine, name: str, key: str) -> Tensor:
    """A parameter's master or slot, where this rank has all of it."""
    shape = engine.shard.partition.shapes[name]
    runs = engine.shard.partition.runs[name]
    if not runs:
        return torch.empty(shape)
    slot = getattr(engine.shard.states[runs[0].flat], key)
    piece: Tensor = slot.piece(runs[0].offset, runs[0].offset + runs[0].numel)
    return piece.view(shape)


def _ds_config(engine: ZeroEngine) -> dict[str, Any]:
    """The run in DeepSpeed's words."""
    settings = engine.settings
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


# Reading


@dataclass
class _RankStates:
    """One saved rank's flat tensors."""

    masters: list[Tensor]
    slots: list[dict[str, Any]]
    """exp_avg, exp_avg_sq, step of each; empty before the first step."""
    scaler: Any


class _Saved:
    """A checkpoint of any stage and world size, seen as a partition and the tensors that fill it."""

    def __init__(self, directory: Path, engine: ZeroEngine) -> None:
        self.directory = directory
        self._engine = engine
        whole = (directory / MODEL).exists()
        files_of_ranks = dict(_optimizer_files(directory))
        self.stage = 3 if not whole else min(2, len(files_of_ranks))
        self.model = self.load(directory / model_file(self.stage, 0))
        self.world = int(self.model["dp_world_size"]) if files_of_ranks else 1
        self._files = _complete(directory, files_of_ranks, self.world) if files_of_ranks else []
        self.partition = self._partition()

    def load(self, path: Path) -> Any:
        with foreign.allowed():
            return files.load(path)

    def _partition(self) -> Partition:
        shapes = {name: tuple(shape) for name, shape in self._named_shapes()}
        self._check(shapes)
        groups = self.model["param_shapes"]
        if not self._files:
            return by_parameter([[name] for name in shapes], shapes, 1)
        if self.stage == 3:
            return by_parameter([list(group) for group in groups], shapes, self.world)
        return contiguous([list(group) for group in groups], shapes, self.world)

    def _named_shapes(self) -> Iterator[tuple[str, Any]]:
        """Trainable parameters in flat order; stage 0 does not tell, so as this run orders them."""
        if self._files:
            for group in self.model["param_shapes"]:
                yield from group.items()
        else:
            for group in self._engine.groups:
                for name in group.names:
                    yield name, getattr(self.model["module"].get(name), "shape", ())

    def _check(self, saved: Shapes) -> None:
        """The same parameters train in both.

        Raises:
            CheckpointError: names or shapes differ.
        """
        wanted = self._engine.shard.partition.shapes
        for name in [*wanted, *saved]:
            there, here = saved.get(name), wanted.get(name)
            if there != here:
                raise CheckpointError(
                    f"{self.directory}: {name} is {there or 'absent'} there and "
                    f"{here or 'absent (or frozen)'} in this run",
                    "give the same --model, --tie-embeddings and --freeze as the run that saved it",
                )

    def rank(self, rank: int) -> _RankStates:
        """Read one rank's file, lazily: tensors stay on disk until they are copied."""
        if not self._files:
            return self._stage_0()
        path = self._files[rank]
        states = self.load(path)["optimizer_state_dict"]
        if self.stage == 3:
            base, masters = states["optimizer_state_dict"], states["fp32_flat_groups"]
        else:
            base = states["base_optimizer_state"]
            masters = states["single_partition_of_fp32_groups"]
        if not isinstance(base, dict) or "state" not in base:
            raise CheckpointError(
                f"{path} holds an elastic optimizer state, which cannot be resumed from",
                "save with elastic_checkpoint false, or use reshard split",
            )
        slots = [base["state"].get(index, {}) for index in range(len(masters))]
        return _RankStates(masters, slots, states.get("loss_scaler"))

    def _stage_0(self) -> _RankStates:
        saved = self.model["optimizer"]
        base = saved.get("optimizer_state_dict", saved)
        names = list(self.partition.shapes)
        if "fp32_groups" in saved:
            masters = [tensor for group in saved["fp32_groups"] for tensor in group]
        else:
            masters = [self.model["module"][name] for name in names]
        if len(masters) != len(names):
            raise CheckpointError(
                f"{self.directory}: {len(masters)} parameters train there, {len(names)} in this run",
                "give the same --freeze and --param-groups as the run that saved it",
            )
        slots = [base["state"].get(index, {}) for index in range(len(masters))]
        return _RankStates(masters, slots, None)


def _optimizer_files(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in directory.glob("*_optim_states.pt"):
        match = re.fullmatch(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt", path.name)
        if match is None:
            raise CheckpointError(
                f"{path} belongs to a model-parallel or expert-parallel run",
                "use reshard to bring it into a data-parallel layout",
            )
        yield int(match[1]), path


def _complete(directory: Path, found: dict[int, Path], world: int) -> list[Path]:
    """The files of ranks 0 to world - 1.

    Raises:
        CheckpointError: one is missing, or there are others.
    """
    missing = [rank for rank in range(world) if rank not in found]
    if missing:
        example = next(iter(found.values())).name
        name = re.sub(r"rank_\d+", f"rank_{missing[0]}", example, count=1)
        raise CheckpointError(
            f"{directory / name} is missing: {world} ranks saved, {len(found)} files are here",
            "copy all ranks' files into the directory, or resume from another --tag",
        )
    if len(found) > world:
        raise CheckpointError(
            f"{directory} holds {len(found)} optimizer files of a run of {world} ranks",
            "remove those of another run",
        )
    return [found[rank] for rank in range(world)]


def read(directory: Path, engine: ZeroEngine) -> dict[str, Any]:
    """Fill this rank's masters, moments, buffers and frozen parameters.

    Returns:
        ``progress`` as the files tell it.

    Raises:
        CheckpointError: see ``Engine.load``.
    """
    saved = _Saved(directory, engine)
    scaler = _read_shard(saved, engine)
    foreign.restore_scaler(engine.scaler, scaler)
    _read_buffers(saved, engine)
    _read_frozen(saved, engine)
    steps, skipped = saved.model["global_steps"], saved.model["skipped_steps"]
    scheduler = saved.model.get("lr_scheduler") or {"last_batch_iteration": steps - skipped - 1}
    return {
        "step": steps,
        "skipped": skipped,
        "samples": saved.model.get("global_samples", steps * engine.settings.global_batch),
        "updates": scheduler["last_batch_iteration"] + 1,
    }


def _read_shard(saved: _Saved, engine: ZeroEngine) -> Any:
    """Copy what overlaps this rank's runs; the loss scaler of the last file read."""
    shard = engine.shard
    wanted: dict[int, list[tuple[Run, Run]]] = {}
    for own in shard.partition.of_rank(shard.rank):
        for run in saved.partition.runs[own.name]:
            if run.start < own.stop and own.start < run.stop:
                wanted.setdefault(run.rank, []).append((run, own))
    scaler = None
    filled = [
        {key: torch.zeros(flat.numel) for key in ("master", *STATE)}
        for flat in shard.partition.flats
    ]
    for rank in wanted or [0]:
        states = saved.rank(rank)
        scaler = states.scaler
        for run, own in wanted.get(rank, []):
            slots = states.slots[run.flat]
            sources = {"master": states.masters[run.flat], **slots}
            for key in filled[own.flat].keys() & sources.keys():
                _copy_overlap(saved.directory, sources[key], run, filled[own.flat][key], own)
            shard.states[own.flat].step.fill_(float(slots.get("step", 0)))
    for state, tensors in zip(shard.states, filled, strict=True):
        for key, tensor in tensors.items():
            getattr(state, key).put(tensor)
    return scaler


def _copy_overlap(directory: Path, source: Tensor, run: Run, target: Tensor, own: Run) -> None:
    start, stop = max(run.start, own.start), min(run.stop, own.stop)
    begin = run.offset + start - run.start
    flat = source.reshape(-1)
    if begin + stop - start > flat.numel():
        raise CheckpointError(
            f"{directory}: rank {run.rank}'s flat tensor {run.flat} has {flat.numel()} elements, and "
            f"{run.name} should reach {begin + stop - start}",
            "its parameters are not laid out as param_shapes says; use reshard to convert it",
            one_rank=True,
        )
    offset = own.offset + start - own.start
    target[offset : offset + stop - start] = flat[begin : begin + stop - start]


def _read_buffers(saved: _Saved, engine: ZeroEngine) -> None:
    parameters = {name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
    for name, value in engine.model.state_dict().items():
        if name not in parameters:
            if name not in saved.model["module"]:
                raise CheckpointError(f"{saved.directory}: buffer {name} is absent there")
            value.copy_(saved.model["module"][name])


def _read_frozen(saved: _Saved, engine: ZeroEngine) -> None:
    frozen = {n: p.shape for n, p in engine.model.named_parameters() if not p.requires_grad}
    if not frozen:
        return
    values = saved.model["module"]
    if saved.stage == 3:
        ranks = [
            saved.model if rank == 0 else saved.load(saved.directory / model_file(3, rank))
            for rank in range(saved.world)
        ]
        fragments = [states["frozen_param_fragments"] or {} for states in ranks]
        values = {
            name: torch.cat([each[name] for each in fragments])
            for name in frozen
            if all(name in each for each in fragments)
        }
    for name, shape in frozen.items():
        if name not in values:
            raise CheckpointError(
                f"{saved.directory}: frozen parameter {name} is absent there",
                "save without exclude_frozen_parameters",
            )
        engine.set_frozen(name, values[name].reshape(-1)[: math.prod(shape)].view(shape))
