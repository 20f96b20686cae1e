"""DeepSpeed's checkpoint directory of any stage, read by any number of ranks.

What lies in a rank's flat tensors follows from ``param_shapes`` and the number of ranks, so a
reader rebuilds the writer's partition and copies what overlaps its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files, foreign
from trainer.checkpoint.deepspeed import MODEL, model_file
from trainer.errors import CheckpointError
from trainer.zero.partition import Partition, Run, Shapes, by_parameter, contiguous
from trainer.zero.shard import STATE
from trainer.zero.state import ZeroState


def read(directory: Path, held: ZeroState) -> dict[str, Any]:
    """Fill this rank's masters, moments, buffers and frozen parameters.

    Returns:
        ``progress`` as the files tell it.

    Raises:
        CheckpointError: see ``Engine.load``.
    """
    saved = _Saved(directory, held)
    scaler = _read_shard(saved, held)
    foreign.restore_scaler(held.scaler, scaler)
    _read_buffers(saved, held)
    _read_frozen(saved, held)
    steps, skipped = saved.model["global_steps"], saved.model["skipped_steps"]
    scheduler = saved.model.get("lr_scheduler") or {"last_batch_iteration": steps - skipped - 1}
    return {
        "step": steps,
        "skipped": skipped,
        "samples": saved.model.get("global_samples", steps * held.settings.global_batch),
        "updates": scheduler["last_batch_iteration"] + 1,
    }


@dataclass
class _RankStates:
    """One saved rank's flat tensors."""

    masters: list[Tensor]
    slots: list[dict[str, Any]]
    """exp_avg, exp_avg_sq, step of each; empty before the first step."""
    scaler: Any


class _Saved:
    """A checkpoint of any stage and world size: a partition, and the tensors that fill it."""

    def __init__(self, directory: Path, held: ZeroState) -> None:
        self.directory = directory
        self._held = held
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
            for group in self._held.groups:
                for name in group.names:
                    yield name, getattr(self.model["module"].get(name), "shape", ())

    def _check(self, saved: Shapes) -> None:
        """The same parameters train in both.

        Raises:
            CheckpointError: names or shapes differ.
        """
        wanted = self._held.shard.partition.shapes
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
                f"{self.directory}: {len(masters)} parameters train there, "
                f"{len(names)} in this run",
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


def _read_shard(saved: _Saved, held: ZeroState) -> Any:
    """Copy what overlaps this rank's runs; the loss scaler of the last file read."""
    shard = held.shard
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
            f"{directory}: rank {run.rank}'s flat tensor {run.flat} has {flat.numel()} elements, "
            f"and {run.name} should reach {begin + stop - start}",
            "its parameters are not laid out as param_shapes says; use reshard to convert it",
            one_rank=True,
        )
    offset = own.offset + start - own.start
    target[offset : offset + stop - start] = flat[begin : begin + stop - start]


def _read_buffers(saved: _Saved, held: ZeroState) -> None:
    parameters = {name for name, _ in held.model.named_parameters(remove_duplicate=False)}
    for name, value in held.model.state_dict().items():
        if name not in parameters:
            if name not in saved.model["module"]:
                raise CheckpointError(f"{saved.directory}: buffer {name} is absent there")
            value.copy_(saved.model["module"][name])


def _read_frozen(saved: _Saved, held: ZeroState) -> None:
    frozen = {n: p.shape for n, p in held.model.named_parameters() if not p.requires_grad}
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
        held.set_frozen(name, values[name].reshape(-1)[: math.prod(shape)].view(shape))
