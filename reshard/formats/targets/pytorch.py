"""Targets that PyTorch-native training loads: DCP, files of FSDP's ranks, whole files."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from reshard.containers import skeletons
from reshard.containers.skeletons import LaidOut
from reshard.errors import UsageError
from reshard.formats.colossalai import target as colossalai
from reshard.formats.dcp import writer as dcp
from reshard.formats.fsdp import flat_files
from reshard.formats.fsdp import rank_files as state_dict
from reshard.formats.pytorch import writer
from reshard.formats.targets.model_parallel import of_deepspeed
from reshard.formats.targets.request import Request
from reshard.formats.trainers import accelerate, hf_trainer
from reshard.layout.mesh import MeshGrid
from reshard.layout.tensor_parallel import Plan
from reshard.manifest import Skeleton
from reshard.model import ModelShapes
from reshard.state_dict import torch_state_dict
from reshard.training import copied_files, schedules
from reshard.training.state import Training, describe_lost_setup
from reshard.training.trainer_run import Run

_BY_ACCELERATE = ("step", "scheduler", "scaler")  # what its directory has a place for


def of_dcp(state: Training, asked: Request) -> LaidOut:
    """A DCP directory, which any number of ranks reads.

    Raises:
        ReshardError: as `dcp.writer.lay_out`.
    """
    made = dcp.lay_out(
        state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )
    return LaidOut(made, _notes(state))


def of_accelerate(state: Training, asked: Request) -> LaidOut:
    """Accelerate's directory of an FSDP run, of DDP, or of one process.

    Raises:
        UsageError: a form that Accelerate does not load.
        ReshardError: as the layout of that form.
    """
    made = _ddp if asked.state_dict_type == "unsharded" else _accelerate
    return LaidOut(made(state, asked), _by_accelerate(state, asked))


def of_fsdp(state: Training, asked: Request) -> LaidOut:
    """FSDP 1 under Accelerate's names, flat parameters too.

    Raises:
        UsageError: a form that FSDP does not load, or flat parameters of an unknown model.
        ReshardError: as the layout of that form.
    """
    made = _local if asked.state_dict_type == "local" else _accelerate
    return LaidOut(made(state, asked), _by_accelerate(state, asked))


def of_ranks(state: Training, asked: Request) -> LaidOut:
    """A file of DTensors a rank; the optimizer of such a source calls its parameters as before.

    Raises:
        ReshardError: as `fsdp.rank_files.fsdp2`.
    """
    source, naming = state.manifest, state_dict.PAIR
    if source.origin.format == "fsdp" and source.keyed == "fqn":
        naming = replace(naming, keyed="fqn")
    made = _rank_files(state, asked, naming)
    return LaidOut(made, (*_of_tensor_plan(state, asked), *_notes(state)))


def of_verl(state: Training, asked: Request) -> LaidOut:
    """Verl's files of ranks, of either version of FSDP.

    Raises:
        UsageError: version 1 of an unknown model, or a mesh that verl does not make.
        ReshardError: as the layout of that version.
    """
    made = _flat_ranks if asked.fsdp_version == 1 else _verl_ranks
    return LaidOut(
        made(state, asked), (*_of_tensor_plan(state, asked), *_notes(state, "scheduler"))
    )


def of_hf_trainer(state: Training, asked: Request) -> LaidOut:
    """A ``checkpoint-N`` of HF Trainer.

    Raises:
        UsageError: a form that the Trainer does not resume from.
        ReshardError: as the layout of that form.
    """
    if asked.deepspeed:
        held, said = of_deepspeed(state, asked)
    else:
        held, said = _trainers(state, asked), _notes(state, "scheduler", "step")
    made = hf_trainer.run(
        state,
        held,
        ranks=asked.world_size,
        deepspeed=asked.deepspeed,
        weights_only=asked.weights_only,
    )
    own = hf_trainer.notes(state, deepspeed=asked.deepspeed, weights_only=asked.weights_only)
    return LaidOut(made, (*said, *own))


def of_trainer(state: Training, asked: Request) -> LaidOut:
    """Lay out a run directory of our trainer, in the form in which it was saved.

    Raises:
        UsageError: the source is no run of the trainer, or the trainer does not save such a form.
        ReshardError: as the layout of that form.
    """
    run = asked.run
    if run is None:
        raise UsageError(
            "--to trainer",
            f"{state.manifest.origin.path} is not a run of python -m trainer",
            "write --to deepspeed or --to fsdp: the trainer resumes from both",
        )
    if not run.has_own_layout:
        raise UsageError(
            "--to trainer",
            f"a run with --strategy {run.settings['strategy']} has DeepSpeed's layout",
            "leave out --to; for --strategy fsdp or fsdp2, write --to fsdp",
        )
    held = _of_trainer(state, asked, run)
    return LaidOut(run.directory(held), _notes(state, "step", "global_samples", "skipped_steps"))


def of_colossalai(state: Training, asked: Request) -> LaidOut:
    """ColossalAI's shards under an index, which any of its plugins loads.

    Raises:
        ReshardError: as `colossalai.target.lay_out`.
    """
    made = colossalai.lay_out(
        state, weights_only=asked.weights_only, model=asked.model, dtype=asked.dtype
    )
    return LaidOut(made, tuple(colossalai.notes(state, weights_only=asked.weights_only)))


def of_torch(state: Training, asked: Request) -> LaidOut:
    """One file with torch.optim's own state.

    Raises:
        ReshardError: as `pytorch.writer.plain`.
    """
    made = writer.plain(
        state,
        name=asked.file,
        model=asked.model,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )
    return LaidOut(made, _notes(state))


def _of_trainer(state: Training, asked: Request, run: Run) -> Skeleton:
    """Lay out one checkpoint of the trainer."""
    form = asked.state_dict_type
    if form == "unsharded" or asked.weights_only:
        raise UsageError(
            "--weights-only" if asked.weights_only else f"--state-dict-type {form}",
            "the trainer does not resume from such a checkpoint",
            "leave it out, or write another layout with --to",
        )
    if form == "full":
        return state_dict.fsdp1_full(state, ranks=asked.world_size, dtype=asked.dtype)
    whole = run.is_whole(asked.world_size)
    if form == "local" and run.settings["strategy"] == "fsdp":
        compute = run.compute if run.settings["fsdp_use_orig_params"] else None
        return flat_files.fsdp1_local(
            state,
            _wrapped(asked, "--state-dict-type local"),
            ranks=asked.world_size,
            naming=state_dict.TRAINER_LOCAL,
            sharded=not whole,
            compute=compute,
            dtype=asked.dtype,
        )
    if asked.rank_files and whole and run.settings["fsdp_use_orig_params"]:
        return skeletons.join(
            state_dict.fsdp1_full(
                state, names=names, rank=rank, ranks=asked.world_size, dtype=asked.dtype
            )
            for rank, names in enumerate(state_dict.TRAINER_RANKS.pairs(asked.world_size))
        )
    if form == "local" or asked.rank_files:
        mesh = run.mesh(asked.world_size)
        return state_dict.fsdp2(
            state,
            MeshGrid(tuple(mesh.values()), tuple(mesh), asked.device),
            naming=state_dict.TRAINER_LOCAL if form == "local" else state_dict.TRAINER_RANKS,
            whole_weights=whole,
            model=asked.model,
            dtype=asked.dtype,
        )
    return dcp.fsdp(state, shards=asked.world_size, dtype=asked.dtype)


def _accelerate(state: Training, asked: Request) -> Skeleton:
    if asked.state_dict_type not in ("full", "sharded"):
        raise UsageError(
            f"--state-dict-type {asked.state_dict_type}",
            "is no form that Accelerate loads",
            "write sharded or full; flat parameters are of --to fsdp, DDP's files of --to"
            " accelerate and hf-trainer, one file is --to torch",
        )
    if asked.state_dict_type == "full":
        return _full(state, asked, accelerate=True)
    if asked.rank_files:
        return _rank_files(state, asked, state_dict.ACCELERATE)
    return dcp.accelerate(
        state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _ddp(state: Training, asked: Request) -> Skeleton:
    return accelerate.unsharded(
        state,
        asked.world_size,
        weights_only=asked.weights_only,
        model=asked.model,
        dtype=asked.dtype,
    )


def _full(state: Training, asked: Request, *, accelerate: bool) -> Skeleton:
    return state_dict.fsdp1_full(
        state,
        ranks=asked.world_size,
        accelerate=accelerate,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )


def _local(state: Training, asked: Request) -> Skeleton:
    if asked.orig_params is not None:
        raise UsageError(
            "--state-dict-type local --use-orig-params",
            "FSDP 1 cannot load such files, its own among them",
            "write --state-dict-type sharded or full, which load with use_orig_params as well",
        )
    return flat_files.fsdp1_local(
        state,
        _wrapped(asked, "--state-dict-type local"),
        ranks=asked.world_size,
        naming=state_dict.LOCAL,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )


def _wrapped(asked: Request, by: str) -> ModelShapes:
    """The model with its units, which flat parameters need.

    Raises:
        UsageError: nobody said.
    """
    if asked.model is None or not asked.model.units:
        raise UsageError(
            by,
            "writes flat parameters, and nothing says which parameters lie in which",
            "say which model is wrapped and how: --model config.json|DIR|module:factory"
            " --wrap LlamaDecoderLayer|size=N|none",
        )
    return asked.model


def _rank_files(state: Training, asked: Request, naming: state_dict.Naming) -> Skeleton:
    return state_dict.fsdp2(
        state,
        _grid(naming, asked),
        naming=naming,
        tensor=asked.tensor,
        weights_only=asked.weights_only,
        model=asked.model,
        dtype=asked.dtype,
    )


def _verl_ranks(state: Training, asked: Request) -> Skeleton:
    return _rank_files(state, asked, state_dict.VERL)


def _flat_ranks(state: Training, asked: Request) -> Skeleton:
    return flat_files.fsdp1_sharded(
        state,
        _wrapped(asked, "--fsdp-version 1"),
        _grid(state_dict.VERL, asked),
        naming=state_dict.VERL,
        compute=asked.orig_params,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )


def _grid(naming: state_dict.Naming, asked: Request) -> MeshGrid:
    """The mesh that was asked for, else the usual one of a single axis.

    Raises:
        UsageError: nothing that reads such files makes that mesh.
    """
    if asked.grid is None:
        usual = naming.meshes[0] if naming.meshes else None
        return MeshGrid((asked.world_size,), usual, asked.device)
    if naming.meshes and asked.grid.names not in naming.meshes:
        known = (",".join(f"{name}=N" for name in names) for names in naming.meshes)
        raise UsageError(
            f"--mesh {asked.grid}",
            "is none under which these files are read",
            f"give {' or '.join(known)}, or write --to fsdp2",
        )
    return asked.grid


def _trainers(state: Training, asked: Request) -> Skeleton:
    """What HF Trainer has of model and optimizer without DeepSpeed."""
    if asked.state_dict_type == "unsharded":
        return hf_trainer.unsharded(
            state,
            ranks=asked.world_size,
            weights_only=asked.weights_only,
            model=asked.model,
            dtype=asked.dtype,
        )
    if asked.state_dict_type == "full":
        return _full(state, asked, accelerate=False)
    if asked.state_dict_type == "sharded":
        return dcp.fsdp(
            state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
        )
    raise UsageError(
        "--state-dict-type local",
        "is no form that the Trainer resumes from",
        "choose sharded, full or unsharded",
    )


def _by_accelerate(state: Training, asked: Request) -> tuple[str, ...]:
    """Say what is derived and dropped in a directory that Accelerate loads."""
    if asked.weights_only:
        return _notes(state, *_BY_ACCELERATE)
    copied = {Path(name).stem for name in state.manifest.train.kept_files}
    schedule = schedules.describe_changes(state.manifest, asked.world_size)
    return (*schedule, *_notes(state, *_BY_ACCELERATE, copied=copied))


def _notes(state: Training, *held: str, copied: Container[str] = ()) -> tuple[str, ...]:
    """What is derived and dropped; ``held`` is what the target has a place for, or all.

    Args:
        copied: what is carried as files of its own.
    """
    train = state.manifest.train
    files = {name: path for name, path in train.kept_files.items() if Path(name).stem not in copied}
    told = {Path(name).stem for name in files} if held else set[str]()
    lost = [
        f"not carried: {name}"
        for name in torch_state_dict.list_dropped(train, held or None)
        if name not in copied and name not in told
    ]
    lost += copied_files.describe_lost(files)
    derived = torch_state_dict.describe_derived(train) if not held or "scaler" in held else []
    return (*derived, *lost, *describe_lost_setup(state))


def _of_tensor_plan(state: Training, asked: Request) -> tuple[str, ...]:
    """What a tensor-parallel axis does, where there is one."""
    grid, tensor = asked.grid, asked.tensor
    return () if grid is None or tensor is None else (_cuts(state, asked.model, grid, tensor),)


def _cuts(state: Training, model: ModelShapes | None, grid: MeshGrid, tensor: Plan) -> str:
    weights = torch_state_dict.build_weights(state, divided=state_dict.is_divided(state, model))
    touched = state_dict.tensor_cuts(grid, tensor, weights)
    parameters = {value.owner for value in weights.values() if value.divided}
    cut = sum(each is not None for each in touched.values())
    counts = f"{cut} of {len(parameters)} parameters cut, {len(touched) - cut} replicated"
    apart = f"{len(parameters) - len(touched)} named by no pattern: whole on each of its ranks"
    return f"tensor parallel by the plan of {tensor.source}: {counts}, {apart}"
