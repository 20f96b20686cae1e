"""Read DeepSpeed's checkpoint directory of any stage with any number of ranks.

``param_shapes`` and the number of ranks determine what a rank's flat tensors contain, so the reader
rebuilds the partition of the writer and copies what overlaps its own::

    saved by 2 ranks    |     rank 0      |     rank 1      |
    read by 3 ranks     |  rank 0   |  rank 1   |  rank 2   |     rank 1 copies from both files
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files, foreign
from trainer.checkpoint.deepspeed import MODEL, name_model_file
from trainer.core.errors import CheckpointError, LayoutError
from trainer.core.partition import (
    Partition,
    Run,
    Shapes,
    partition_each_parameter,
    partition_groups,
)
from trainer.core.shard import STATE
from trainer.core.zero import ZeroEngine
from trainer.core.zero3 import Zero3Engine


def read(directory: Path, engine: ZeroEngine) -> dict[str, Any]:
    """Fill the engine from a checkpoint of any stage and any number of ranks. Collective.

    Returns:
        The progress that the files record.
    """
    with torch.no_grad(), engine.ranks.raise_on_all("read the checkpoint"):
        progress = _fill(directory, engine)
    engine.refresh_parameters()
    return progress


def _fill(directory: Path, engine: ZeroEngine) -> dict[str, Any]:
    """Fill this rank's masters, moments, buffers and frozen parameters."""
    saved = _Saved(directory, engine)
    scaler = _fill_shard(saved, engine)
    foreign.restore_scaler(engine.scaler, scaler)
    _fill_buffers(saved, engine)
    _fill_frozen(saved, engine)
    steps, skipped = saved.model["global_steps"], saved.model["skipped_steps"]
    # Other schedulers than DeepSpeed's may count other things: Accelerate's steps once a rank.
    scheduler = saved.model.get("lr_scheduler") or {}
    last = scheduler.get("last_batch_iteration", steps - skipped - 1)
    return {
        "step": steps,
        "skipped": skipped,
        "samples": saved.model.get("global_samples", steps * engine.settings.global_batch),
        "updates": last + 1,
    }


@dataclass
class _RankStates:
    """The flat tensors of one saved rank."""

    masters: list[Tensor]
    slots: list[dict[str, Any]]
    """exp_avg, exp_avg_sq and step of each flat tensor; empty before the first step."""
    scaler: Any


class _Saved:
    """A checkpoint of any stage and world size: its partition, and the tensors that fill it."""

    def __init__(self, directory: Path, engine: ZeroEngine) -> None:
        self.directory = directory
        self._engine = engine
        whole = (directory / MODEL).exists()
        files_of_ranks = dict(_find_optimizer_files(directory))
        # Stages 1 and 2 have the same layout, so 2 stands for both.
        self.stage = 3 if not whole else min(2, len(files_of_ranks))
        path = directory / name_model_file(self.stage, 0)
        self.model = self.load(path)
        shapes = ["param_shapes"] if files_of_ranks else ["optimizer"]
        keys = ["module", "dp_world_size", "global_steps", "skipped_steps", *shapes]
        files.check_keys(self.model, path, *keys)
        self.world = int(self.model["dp_world_size"]) if files_of_ranks else 1
        self._files = (
            _check_complete(directory, files_of_ranks, self.world) if files_of_ranks else []
        )
        self.partition = self._rebuild_partition()

    def load(self, path: Path) -> Any:
        with foreign.allow_classes():
            return files.load(path)

    def _rebuild_partition(self) -> Partition:
        shapes = {name: tuple(shape) for name, shape in self._named_shapes()}
        self._check_shapes(shapes)
        groups = self.model["param_shapes"]
        if not self._files:
            return partition_each_parameter([[name] for name in shapes], shapes, 1)
        if self.stage == 3:
            return partition_each_parameter([list(group) for group in groups], shapes, self.world)
        return partition_groups([list(group) for group in groups], shapes, self.world)

    def _named_shapes(self) -> Iterator[tuple[str, Any]]:
        """Yield trainable parameters in flat order; stage 0 has no order, so this run's is used."""
        if self._files:
            for group in self.model["param_shapes"]:
                yield from group.items()
        else:
            for group in self._engine.groups:
                for name in group.names:
                    yield name, getattr(self.model["module"].get(name), "shape", ())

    def _check_shapes(self, saved: Shapes) -> None:
        """Raise CheckpointError if names or shapes of the trainable parameters differ."""
        expected = self._engine.shard.partition.shapes
        for name in [*expected, *saved]:
            stored, own = saved.get(name), expected.get(name)
            if stored != own:
                raise CheckpointError(
                    f"{self.directory}: {name} is {stored or 'absent'} in the checkpoint and "
                    f"{own or 'absent (or frozen)'} in this run",
                    "give the same --model, --tie-embeddings and --freeze as the run that saved it",
                )

    def load_rank(self, rank: int) -> _RankStates:
        """Load one rank's file lazily: tensors stay on disk until they are copied."""
        if not self._files:
            return self._load_stage_0()
        path = self._files[rank]
        content = self.load(path)
        files.check_keys(content, path, "optimizer_state_dict")
        states = content["optimizer_state_dict"]
        if self.stage == 3:
            files.check_keys(states, path, "optimizer_state_dict", "fp32_flat_groups")
            base, masters = states["optimizer_state_dict"], states["fp32_flat_groups"]
        else:
            files.check_keys(
                states, path, "base_optimizer_state", "single_partition_of_fp32_groups"
            )
            base = states["base_optimizer_state"]
            masters = states["single_partition_of_fp32_groups"]
        if not isinstance(base, dict) or "state" not in base:
            raise LayoutError(f"{path} has an elastic optimizer state")
        slots = [base["state"].get(index, {}) for index in range(len(masters))]
        _check_adam(slots, path)
        return _RankStates(masters, slots, states.get("loss_scaler"))

    def _load_stage_0(self) -> _RankStates:
        saved = self.model["optimizer"]
        base = saved.get("optimizer_state_dict", saved)
        names = list(self.partition.shapes)
        if "fp32_groups" in saved:
            masters = [tensor for group in saved["fp32_groups"] for tensor in group]
        else:
            masters = [self.model["module"][name] for name in names]
        if len(masters) != len(names):
            raise CheckpointError(
                f"{self.directory}: {len(masters)} parameters are trained in the checkpoint, and "
                f"{len(names)} in this run",
                "give the same --freeze and --param-groups as the run that saved it",
            )
        slots = [base["state"].get(index, {}) for index in range(len(masters))]
        _check_adam(slots, self.directory)
        scaler = None
        if saved.get("dynamic_loss_scale"):  # which has no hysteresis in stage 0
            fields = ("cur_scale", "cur_iter", "last_overflow_iter")
            files.check_keys(saved, self.directory, *fields)
            patience = self._engine.scaler.patience
            scaler = foreign.DynamicScaler(
                **{name: saved[name] for name in fields}, cur_hysteresis=patience
            )
        return _RankStates(masters, slots, scaler)


def _check_adam(slots: list[dict[str, Any]], path: Path) -> None:
    """Raise CheckpointError for the state of another optimizer; before the first step it is empty.

    Without this check moments that are not there would silently be zero.
    """
    for slot in slots:
        if slot and not slot.keys() >= set(STATE):
            raise CheckpointError(
                f"{path} has an optimizer state of {', '.join(map(str, slot))}, and AdamW needs "
                f"{' and '.join(STATE)}",
                "start from its weights: reshard merge CHECKPOINT DIR, then --model DIR",
                one_rank=True,
            )


def _find_optimizer_files(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in directory.glob("*_optim_states.pt"):
        match = re.fullmatch(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt", path.name)
        if match is None:
            raise LayoutError(f"{path} is from a model-parallel or expert-parallel run")
        yield int(match[1]), path


def _check_complete(directory: Path, by_rank: dict[int, Path], world: int) -> list[Path]:
    """Return the files of ranks 0 to world - 1.

    Raises:
        CheckpointError: files of ranks are missing, or there are more.
    """
    missing = [rank for rank in range(world) if rank not in by_rank]
    if missing:
        example = next(iter(by_rank.values())).name
        name = re.sub(r"rank_\d+", f"rank_{missing[0]}", example, count=1)
        raise CheckpointError(
            f"{directory / name} is missing: {world} ranks saved, and {len(by_rank)} of their "
            "files are in the directory",
            "copy all ranks' files into the directory, or resume from another --tag",
        )
    if len(by_rank) > world:
        raise CheckpointError(
            f"{directory} has {len(by_rank)} optimizer files, and {world} ranks saved",
            "remove the files of another run",
        )
    return [by_rank[rank] for rank in range(world)]


def _fill_shard(saved: _Saved, engine: ZeroEngine) -> Any:
    """Copy what overlaps this rank's runs; return the loss scaler of the last file read."""
    shard = engine.shard
    overlaps = _find_overlaps(saved.partition, shard.partition.runs_of_rank(shard.rank))
    scaler = None
    filled = [
        {key: torch.zeros(flat.numel) for key in ("master", *STATE)}
        for flat in shard.partition.flats
    ]
    counted: set[int] = set()
    for rank in overlaps or [0]:  # a rank without elements needs the loss scale, too
        states = saved.load_rank(rank)
        scaler = states.scaler
        for run, own in overlaps.get(rank, []):
            slots = states.slots[run.flat]
            sources = {"master": states.masters[run.flat], **slots}
            for key in filled[own.flat].keys() & sources.keys():
                _copy_overlap(saved.directory, sources[key], run, filled[own.flat][key], own)
            shard.states[own.flat].step.fill_(float(slots.get("step", 0)))
            counted.add(own.flat)
    for number, flat in enumerate(shard.partition.flats):
        if number not in counted:
            shard.states[number].step.fill_(_read_step(saved, flat.names))
    for state, tensors in zip(shard.states, filled, strict=True):
        for key, tensor in tensors.items():
            getattr(state, key).put(tensor)
    return scaler


def _find_overlaps(saved: Partition, own_runs: Iterator[Run]) -> dict[int, list[tuple[Run, Run]]]:
    """Return rank that saved -> pairs of its run and this rank's run, which share elements."""
    overlaps: dict[int, list[tuple[Run, Run]]] = {}
    for own in own_runs:
        for run in saved.runs[own.name]:
            if run.start < own.stop and own.start < run.stop:
                overlaps.setdefault(run.rank, []).append((run, own))
    return overlaps


def _read_step(saved: _Saved, names: Sequence[str]) -> float:
    """Return how often the parameters of a flat tensor were updated, from the file of any rank.

    A rank that has no elements of a flat tensor needs the number, too: as in DeepSpeed, it counts
    the updates of its padding, and the files of all ranks must state the same number.
    """
    run = next((run for name in names for run in saved.partition.runs[name]), None)
    if run is None:  # parameters without elements are in no file
        return 0.0
    return float(saved.load_rank(run.rank).slots[run.flat].get("step", 0))


def _copy_overlap(directory: Path, source: Tensor, run: Run, target: Tensor, own: Run) -> None:
    start, stop = max(run.start, own.start), min(run.stop, own.stop)
    begin = run.offset + start - run.start
    flat = source.reshape(-1)
    if begin + stop - start > flat.numel():
        raise LayoutError(
            f"{directory}: flat tensor {run.flat} of rank {run.rank} has {flat.numel()} elements, "
            f"and {run.name} should end at element {begin + stop - start}",
            "param_shapes does not describe this layout",
            one_rank=True,
        )
    offset = own.offset + start - own.start
    target[offset : offset + stop - start] = flat[begin : begin + stop - start]


def _fill_buffers(saved: _Saved, engine: ZeroEngine) -> None:
    parameters = {name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
    for name, value in engine.model.state_dict().items():
        if name not in parameters:
            if name not in saved.model["module"]:
                raise CheckpointError(
                    f"{saved.directory} has no buffer {name}, which this run's model has",
                    "resume with the model of the run that saved it",
                )
            value.copy_(saved.model["module"][name])


def _fill_frozen(saved: _Saved, engine: ZeroEngine) -> None:
    frozen = {n: p.shape for n, p in engine.model.named_parameters() if not p.requires_grad}
    if not frozen:
        return
    values = saved.model["module"]
    if saved.stage == 3:
        ranks = [
            saved.model if rank == 0 else saved.load(saved.directory / name_model_file(3, rank))
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
                f"{saved.directory} has no frozen parameter {name}",
                "save without exclude_frozen_parameters, or give the same --freeze",
            )
        _set_frozen(engine, name, values[name].reshape(-1)[: math.prod(shape)])


def _set_frozen(engine: ZeroEngine, name: str, whole: Tensor) -> None:
    """Set a frozen parameter to the flat tensor ``whole``; in stage 3, keep this rank's piece."""
    if not isinstance(engine, Zero3Engine):
        parameter = engine.model.get_parameter(name)
        parameter.data.copy_(whole.view(parameter.shape))
        return
    piece = math.ceil(whole.numel() / engine.ranks.world)
    own = whole[engine.ranks.rank * piece : (engine.ranks.rank + 1) * piece]
    for unit in engine.units:
        unit.update({name: own})
