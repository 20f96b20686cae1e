"""Read DeepSpeed's checkpoint directory, as far as a rank needs one file of each kind.

A rank reads stage 0, whose file has whole tensors, or what the same rank saved in the same stage (1
and 2 have one layout). `any_format` offers every other checkpoint in that form. For ddp, where
every rank owns everything, that is stage 1 with one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files, foreign
from trainer.checkpoint.deepspeed import MODEL, MOMENTS, name_model_file, name_optimizer_file
from trainer.core.errors import CheckpointError, LayoutError
from trainer.core.partition import (
    Partition,
    Shapes,
    partition_each_parameter,
    partition_groups,
)
from trainer.core.zero import ZeroEngine
from trainer.core.zero3 import Zero3Engine


def read(directory: Path, engine: ZeroEngine) -> dict[str, Any]:
    """Fill the engine from the files of its ranks. Collective.

    Returns:
        The progress that the files record.

    Raises:
        CheckpointError: the checkpoint does not fit this run; LayoutError if only the cut differs.
    """
    with torch.no_grad(), engine.ranks.raise_on_all("read the checkpoint"):
        progress = _fill(directory, engine)
    engine.copy_masters_to_parameters()
    return progress


def _fill(directory: Path, engine: ZeroEngine) -> dict[str, Any]:
    rank, world = engine.shard.rank, engine.shard.partition.world
    is_cut = not (directory / MODEL).exists()
    path = directory / name_model_file(3 if is_cut else 0, rank)
    if not path.exists():
        raise LayoutError(f"{path} is missing")
    model = _load(path)
    keys = ("module", "param_shapes", "dp_world_size", "global_steps", "skipped_steps")
    files.check_keys(model, path, *keys)
    if model["param_shapes"] is None:
        files.check_keys(model, path, "optimizer")
        states = _get_stage_0(engine, path, model)
    elif is_cut != isinstance(engine, Zero3Engine) or model["dp_world_size"] != world:
        raise LayoutError(f"{path} is of another stage, or of {model['dp_world_size']} ranks")
    else:
        states = _load_rank(engine, directory, model["param_shapes"])
    _fill_shard(engine, path, states)
    _fill_buffers(engine, path, model["module"])
    _fill_frozen(engine, path, model, is_cut=is_cut)
    steps, skipped = model["global_steps"], model["skipped_steps"]
    # Other schedulers than DeepSpeed's may count other things: Accelerate's steps once a rank.
    scheduler = model.get("lr_scheduler") or {}
    last = scheduler.get("last_batch_iteration", steps - skipped - 1)
    return {
        "step": steps,
        "skipped": skipped,
        "samples": model.get("global_samples", steps * engine.settings.global_batch),
        "updates": last + 1,
    }


@dataclass
class _States:
    """The flat tensors of one file, and which elements are where in them."""

    partition: Partition
    masters: list[Tensor]
    slots: list[dict[str, Any]]
    """exp_avg, exp_avg_sq and step of each flat tensor; empty before the first step."""
    scaler: Any


def _load(path: Path) -> Any:
    with foreign.allow_classes():
        return files.load(path)


def _load_rank(engine: ZeroEngine, directory: Path, groups: list[dict[str, Any]]) -> _States:
    """Load what this rank saved, lazily: tensors stay on disk until they are copied."""
    names = [name_optimizer_file(precision, engine.shard.rank) for precision in ("fp32", "bf16")]
    found = [directory / name for name in names if (directory / name).exists()]
    if not found:
        raise LayoutError(f"{directory / names[0]} is missing")
    path = found[0]
    content = _load(path)
    files.check_keys(content, path, "optimizer_state_dict")
    states = content["optimizer_state_dict"]
    keys = ("base_optimizer_state", "single_partition_of_fp32_groups")
    if isinstance(engine, Zero3Engine):
        keys = ("optimizer_state_dict", "fp32_flat_groups")
    files.check_keys(states, path, *keys)
    base, masters = (states[key] for key in keys)
    if not isinstance(base, dict) or "state" not in base:
        raise LayoutError(f"{path} has an elastic optimizer state")
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    cut = partition_each_parameter if isinstance(engine, Zero3Engine) else partition_groups
    partition = cut([list(group) for group in groups], shapes, engine.shard.partition.world)
    slots = [base["state"].get(index, {}) for index in range(len(masters))]
    return _States(partition, masters, slots, states.get("loss_scaler"))


def _get_stage_0(engine: ZeroEngine, path: Path, model: dict[str, Any]) -> _States:
    """Return whole tensors of stage 0, which has them in the order of the param groups."""
    saved = model["optimizer"]
    base = saved.get("optimizer_state_dict", saved)
    names = [name for group in engine.groups for name in group.names]
    if "fp32_groups" in saved:
        masters = [tensor for group in saved["fp32_groups"] for tensor in group]
    else:
        masters = [model["module"].get(name) for name in names]
    sizes = [len(group["params"]) for group in base["param_groups"]]
    if sizes != [len(group.names) for group in engine.groups] or len(masters) != len(names):
        raise LayoutError(f"{path} has param groups of {sizes} parameters, unlike this run")
    shapes = {n: tuple(getattr(t, "shape", ())) for n, t in zip(names, masters, strict=True)}
    partition = partition_each_parameter([[name] for name in names], shapes, 1)
    slots = [base["state"].get(index, {}) for index in range(len(masters))]
    scaler = None
    if saved.get("dynamic_loss_scale"):  # which has no hysteresis in stage 0
        fields = ("cur_scale", "cur_iter", "last_overflow_iter")
        files.check_keys(saved, path, *fields)
        counts = {name: saved[name] for name in fields}
        scaler = foreign.DynamicScaler(**counts, cur_hysteresis=engine.scaler.patience)
    return _States(partition, masters, slots, scaler)


def _fill_shard(engine: ZeroEngine, path: Path, saved: _States) -> None:
    """Copy this rank's elements of masters and moments, and take over the loss scale."""
    shard = engine.shard
    _check_shapes(path, saved.partition.shapes, shard.partition.shapes)
    _check_adam(saved.slots, path)
    filled = [
        {key: torch.zeros(flat.piece_numel) for key in ("master", *MOMENTS)}
        for flat in shard.partition.flats
    ]
    rank = shard.rank if saved.partition.world > 1 else 0
    there = {run.name: run for run in saved.partition.runs_of_rank(rank)}
    for own in shard.partition.runs_of_rank(shard.rank):
        run = there.get(own.name)
        if run is None or not run.start <= own.start <= own.stop <= run.stop:
            raise LayoutError(f"{path} has other param groups than this run")
        sources = {"master": saved.masters[run.flat], **saved.slots[run.flat]}
        begin = run.offset + own.start - run.start
        for key, target in filled[own.flat].items():
            if key in sources:
                source = sources[key].reshape(-1)[begin : begin + own.numel]
                target[own.offset : own.offset + own.numel] = source
    for flat, state, tensors in zip(shard.partition.flats, shard.states, filled, strict=True):
        for key, tensor in tensors.items():
            getattr(state, key).copy_(tensor)
        # A rank without elements counts the updates of its padding, too.
        flats = enumerate(saved.partition.flats)
        number = next(index for index, each in flats if flat.names[0] in each.names)
        state.step.fill_(float(saved.slots[number].get("step", 0)))
    foreign.restore_scaler(engine.scaler, saved.scaler)


def _check_shapes(path: Path, saved: Shapes, own: Shapes) -> None:
    """Raise CheckpointError if names or shapes of the trainable parameters differ."""
    for name in [*own, *saved]:
        stored, expected = saved.get(name), own.get(name)
        if stored != expected:
            raise CheckpointError(
                f"{path}: {name} is {stored or 'absent'} in the checkpoint and "
                f"{expected or 'absent (or frozen)'} in this run",
                "give the same --model, --tie-embeddings and --freeze as the run that saved it",
            )


def _check_adam(slots: list[dict[str, Any]], path: Path) -> None:
    """Raise CheckpointError for the state of another optimizer; before the first step it is empty.

    Without this check moments that are not there would silently be zero.
    """
    for slot in slots:
        if slot and not slot.keys() >= set(MOMENTS):
            raise CheckpointError(
                f"{path} has an optimizer state of {', '.join(map(str, slot))}, and AdamW needs "
                f"{' and '.join(MOMENTS)}",
                "start from its weights: reshard merge CHECKPOINT DIR, then --model DIR",
                one_rank=True,
            )


def _fill_buffers(engine: ZeroEngine, path: Path, saved: dict[str, Tensor]) -> None:
    parameters = {name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
    for name, value in engine.model.state_dict().items():
        if name not in parameters:
            if name not in saved:
                raise CheckpointError(
                    f"{path} has no buffer {name}, which this run's model has",
                    "resume with the model of the run that saved it",
                )
            value.copy_(saved[name])


def _fill_frozen(engine: ZeroEngine, path: Path, model: dict[str, Any], *, is_cut: bool) -> None:
    """Set the frozen parameters; files of stage 3 have the pieces that stage 3 keeps."""
    saved = (model.get("frozen_param_fragments") or {}) if is_cut else model["module"]
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            continue
        if name not in saved:
            raise CheckpointError(
                f"{path} has no frozen parameter {name}",
                "save without exclude_frozen_parameters, or give the same --freeze",
            )
        value = saved[name].reshape(-1)
        if isinstance(engine, Zero3Engine):
            piece = math.ceil(parameter.numel() / engine.ranks.world)
            begin = 0 if is_cut else engine.ranks.rank * piece
            for unit in engine.units:
                unit.write({name: value[begin : begin + piece]})
        else:
            parameter.data.copy_(value.view(parameter.shape))
