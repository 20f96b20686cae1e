"""Layouts that PyTorch-native training loads: DCP, files of FSDP's ranks, whole files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.skeletons import LaidOut
from reshard.core.manifest import Manifest, Skeleton
from reshard.errors import UnsupportedError, UsageError
from reshard.formats import registry
from reshard.formats.dcp import saved_keys
from reshard.formats.dcp import writer as dcp
from reshard.formats.dcp.saved_keys import SavedKeys
from reshard.formats.fsdp import flat_files, rank_files
from reshard.formats.parameter_kinds import build_is_divided
from reshard.formats.pytorch.directory import FILE, NAME
from reshard.formats.request import Request
from reshard.formats.trainers import accelerate, hf_param_groups, hf_trainer
from reshard.layouts.mesh import MeshGrid, find_only_axis
from reshard.layouts.tensor_parallel import TensorPlan
from reshard.model import ModelShapes
from reshard.state_dict import torch_state_dict
from reshard.state_dict.optimizers.numbering import can_name_groups
from reshard.state_dict.slots import WholeSlots
from reshard.training import copied_files, schedules, trainer_run
from reshard.training.state import (
    WritableState,
    describe_lost_setup,
    describe_slots_of_flat_tensors,
)
from reshard.training.trainer_run import TrainerRun
from reshard.units import abridge

# AReaL 1.0.4 ``fsdp_engine.py`` saves the optimizer of each rank beside a model of Hugging Face.
_ALL_OF_RANKS = (
    "the weights are in files of ranks, too, not in safetensors files as in the source, whose"
    " program may not load them"
)
_BY_ACCELERATE = ("step", "scheduler", "scaler")  # parts that Accelerate's directory can store


def lay_out(name: str, state: WritableState, request: Request) -> LaidOut:
    """Lay out the files of a target.

    Raises:
        UnsupportedError: the optimizer's state is that of flat tensors, which the target's are not.
        ReshardError: as the function of the target in `LAYOUTS`.
    """
    has_moments = not (request.weights_only or request.separate_masters or request.target)
    flat = describe_slots_of_flat_tensors(state) if has_moments else None
    flat_verl = name == "verl" and request.fsdp_version == 1
    is_whole = name in (NAME, "fsdp2", "verl") and not flat_verl
    if flat and (is_whole or request.state_dict_type == "unsharded"):
        raise UnsupportedError(
            state.manifest.origin.path,
            flat,
            "write --to fsdp or --to deepspeed (stage 1, 2 or 3), whose tensors are flat too, or"
            " leave out the optimizer: --weights-only",
        )
    laid_out = LAYOUTS[name](state, request)
    notes = [f"only FSDP 1 continues from this optimizer: {flat}"] if flat else []
    return laid_out._replace(notes=(*laid_out.notes, *notes))


def lay_out_dcp(state: WritableState, request: Request) -> LaidOut:
    """Lay out a DCP directory, which any number of ranks reads.

    Without ``--to``, a DCP source keeps its keys, so that the program that saved it loads the
    output. Otherwise the directory has ``model`` and ``optim``.
    """
    if isinstance(request, SavedKeys):
        return saved_keys.lay_out(state, request)
    notes = (*_describe_changes(state), *_note_keys(state, request, "optim"))
    return LaidOut(dcp.lay_out(state, request), notes)


def _note_keys(state: WritableState, request: Request, optimizer: str) -> Iterator[str]:
    """Yield notes on the keys that a program must load, if those of the source are other ones."""
    if optimizer == "optim" and any(path.endswith(".distcp") for path in state.manifest.files):
        own = "split without --to keeps those of the source"
        if request.keeps_layout:
            own = "those of the source could not be kept"
        yield f'the keys begin with "model" and "optim"; {own}'
    written = {"model": "model"}
    if not request.weights_only:
        written["optimizer"] = optimizer
    if not request.weights_only or optimizer == "optim":  # DCP has them beside weights alone, too
        written |= {part: part for part in ("scheduler", "scaler", "step")}
    keys = state.manifest.train.keys
    renamed = [
        f"{keys[part]} -> {key}" for part, key in written.items() if keys.get(part, key) != key
    ]
    if renamed and state.manifest.origin.format in ("dcp", NAME):  # with keys of the script
        yield f"keys with another name than in the source: {', '.join(renamed)}"


def lay_out_accelerate(state: WritableState, request: Request) -> LaidOut:
    """Lay out Accelerate's directory of a DeepSpeed or FSDP run, of DDP, or of one process."""
    if request.separate_masters:
        request = replace(request, tag=request.tag or accelerate.TAG, program="accelerate")
        return registry.find_writer("deepspeed").lay_out(state, request)
    is_unsharded = request.state_dict_type == "unsharded"
    lay_out = accelerate.lay_out_unsharded if is_unsharded else _lay_out_for_accelerate
    return LaidOut(lay_out(state, request), _note_changes_for_accelerate(state, request))


def lay_out_fsdp(state: WritableState, request: Request) -> LaidOut:
    """Lay out FSDP 1's files under Accelerate's names, flat parameters too."""
    is_local = request.state_dict_type == "local"
    lay_out = _lay_out_local if is_local else _lay_out_for_accelerate
    plain = _note_plain(state, request, "ignored_states") if is_local else ()
    idle = _note_idle(state, request) if is_local else ()
    notes = (*plain, *idle, *_note_changes_for_accelerate(state, request))
    return LaidOut(lay_out(state, request), notes)


def lay_out_fsdp2(state: WritableState, request: Request) -> LaidOut:
    """Lay out a file of DTensors per rank; the optimizer keeps the keys of such a source."""
    source, naming = state.manifest, rank_files.PAIR
    if source.origin.format == "fsdp" and source.keyed == "fqn":
        naming = replace(naming, keyed="fqn")
    skeleton = _lay_out_rank_files(state, request, naming)
    cuts = (*_note_cuts(state, request), *_note_plain(state, request, "ignored_params"))
    if request.keeps_layout and any(path.endswith(".safetensors") for path in source.files):
        cuts = (*cuts, _ALL_OF_RANKS)
    return LaidOut(skeleton, (*cuts, *_note_changes(state, request)))


def lay_out_verl(state: WritableState, request: Request) -> LaidOut:
    """Lay out verl's files of ranks, for either version of FSDP."""
    if request.fsdp_version == 1:
        model = _require_units(request, "--fsdp-version 1")
        grid = _choose_grid(rank_files.VERL, request, state.manifest)
        skeleton = flat_files.lay_out_fsdp1_sharded(state, model, request, grid)
        notes = _note_idle(state, request)
    else:
        skeleton = _lay_out_rank_files(state, request, rank_files.VERL)
        notes = _note_cuts(state, request)
    return LaidOut(skeleton, (*notes, *_note_changes(state, request, "scheduler")))


def lay_out_hf_trainer(state: WritableState, request: Request) -> LaidOut:
    """Lay out a ``checkpoint-N`` of HF Trainer."""
    deepspeed, adapted = request.separate_masters, list[str]()
    if not deepspeed and not request.weights_only:
        state, adapted = hf_param_groups.adapt_groups(state, request.model)
    if deepspeed:
        own = state if request.weights_only else hf_trainer.add_scheduler(state)
        files, notes, *_ = registry.find_writer("deepspeed").lay_out(own, request)
    else:
        files = _lay_out_state_dicts(state, request)
        notes = _note_changes(state, request, "scheduler", "step")
    skeleton = hf_trainer.lay_out_run(state, files, request)
    return LaidOut(skeleton, (*notes, *adapted, *hf_trainer.describe_derived(state, request)))


def lay_out_trainer(state: WritableState, request: Request) -> LaidOut:
    """Lay out a run directory of our trainer, in the form in which it was saved."""
    run = require_run(request, state.manifest)
    checkpoint = _lay_out_checkpoint(state, request, run)
    return LaidOut(
        run.lay_out_directory(checkpoint),
        _note_changes(state, request, "step", "global_samples", "skipped_steps"),
    )


def require_run(request: Request, source: Manifest) -> TrainerRun:
    """Return the run of our trainer that is written.

    Raises:
        UsageError: the source is not a run of the trainer, or the trainer does not save this form.
    """
    run = request.run
    if run is None:
        raise UsageError(
            "--to trainer",
            f"{source.origin.path} is not a run of python -m trainer",
            "write --to deepspeed or --to fsdp: the trainer resumes from both",
        )
    if not run.has_own_layout:
        raise UsageError(
            "--to trainer",
            f"a run with --strategy {run.settings['strategy']} has DeepSpeed's layout",
            "leave out --to; for --strategy fsdp or fsdp2, write --to fsdp",
        )
    return run


def lay_out_torch(state: WritableState, request: Request) -> LaidOut:
    """Lay out one file as a script without sharding saves it, with torch.optim's own state."""
    weights = torch_state_dict.build_weights(state, dtype=request.dtype)
    root: dict[str, Any] = {"model": OrderedDict(weights)}
    if not request.weights_only:
        # With several groups, numbers do not show which of two parameters of equal shape is in
        # which group, and a file of whole tensors does not show which of two is a buffer.
        shapes = {weight.fqn: weight.shape for weight in state.weights}
        named = len(state.groups) > 1 or not can_name_groups(shapes, state.groups)
        root["optimizer"] = torch_state_dict.build_optimizer(
            state, "index", request.model, named=named
        )
        beside = torch_state_dict.collect_extra_state(state.manifest.train)
        root.update((key, value) for key, value in beside.items() if key not in root)
    file = request.file or FILE
    skeleton = torch_writer.lay_out_object(
        file, root, slot_of=WholeSlots(), stamp=state.stamp(file, 0, 1)
    )
    keys = _note_keys(state, request, "optimizer")
    return LaidOut(skeleton, (*_note_changes(state, request), *keys))


LAYOUTS: dict[str, Callable[[WritableState, Request], LaidOut]] = {  # by the names for --to
    "dcp": lay_out_dcp,
    "accelerate": lay_out_accelerate,
    "hf-trainer": lay_out_hf_trainer,
    "fsdp2": lay_out_fsdp2,
    "verl": lay_out_verl,
    "fsdp": lay_out_fsdp,
    trainer_run.NAME: lay_out_trainer,
    NAME: lay_out_torch,
}


def _lay_out_checkpoint(state: WritableState, request: Request, run: TrainerRun) -> Skeleton:
    form = request.state_dict_type
    if form == "unsharded" or request.weights_only:
        raise UsageError(
            request.weights_option if request.weights_only else f"--state-dict-type {form}",
            "the trainer cannot resume from such a checkpoint",
            "leave it out, or write another layout with --to",
        )
    if form == "full":
        return rank_files.lay_out_fsdp1_full(state, request)
    whole = run.is_whole(request.world_size)
    if form == "local" and run.settings["strategy"] == "fsdp":
        compute = run.compute if run.settings["fsdp_use_orig_params"] else None
        return flat_files.lay_out_fsdp1_local(
            state,
            _require_units(request, "--state-dict-type local"),
            request,
            naming=rank_files.TRAINER_LOCAL,
            sharded=not whole,
            compute=compute,
        )
    # Under NO_SHARD with use_orig_params, each rank saves the whole, unsharded state.
    if request.rank_files and whole and run.settings["fsdp_use_orig_params"]:
        return skeletons.join(
            rank_files.lay_out_fsdp1_full(
                state,
                request,
                names=rank_files.TRAINER_RANKS.format_pair(rank, request.world_size),
                rank=rank,
            )
            for rank in range(request.world_size)
        )
    if form == "local" or request.rank_files:
        mesh = run.mesh(request.world_size)
        return rank_files.lay_out_fsdp2(
            state,
            request,
            MeshGrid(tuple(mesh.values()), tuple(mesh), request.device),
            naming=rank_files.TRAINER_LOCAL if form == "local" else rank_files.TRAINER_RANKS,
            whole_weights=whole,
        )
    return dcp.lay_out_fsdp(state, request)


def _lay_out_for_accelerate(state: WritableState, request: Request) -> Skeleton:
    if request.state_dict_type not in ("full", "sharded"):
        raise UsageError(
            f"--state-dict-type {request.state_dict_type}",
            "is not a state dict type that Accelerate loads",
            "write sharded or full; flat parameters need --to fsdp, DDP's files --to accelerate or"
            " hf-trainer, one file --to torch",
        )
    if request.state_dict_type == "full":
        return rank_files.lay_out_fsdp1_full(state, request, accelerate=True)
    if request.rank_files:
        return _lay_out_rank_files(state, request, rank_files.ACCELERATE)
    return dcp.lay_out_accelerate(state, request)


def _lay_out_local(state: WritableState, request: Request) -> Skeleton:
    if request.orig_params is not None:
        raise UsageError(
            "--state-dict-type local --use-orig-params",
            "FSDP 1 cannot load such files, including its own",
            "write --state-dict-type sharded or full, which load with use_orig_params as well",
        )
    return flat_files.lay_out_fsdp1_local(
        state,
        _require_units(request, "--state-dict-type local"),
        request,
        naming=rank_files.LOCAL,
    )


def _require_units(request: Request, by: str) -> ModelShapes:
    if request.model is None or not request.model.units:
        raise UsageError(
            by,
            "writes flat parameters, but no file states which parameters each contains",
            "pass the model and how it is wrapped: --model config.json|DIR|module:factory --wrap"
            " LlamaDecoderLayer|size=N|none",
        )
    return request.model


def _lay_out_rank_files(
    state: WritableState, request: Request, naming: rank_files.FileNames
) -> Skeleton:
    grid = _choose_grid(naming, request, state.manifest)
    return rank_files.lay_out_fsdp2(state, request, grid, naming=naming)


def _choose_grid(naming: rank_files.FileNames, request: Request, source: Manifest) -> MeshGrid:
    if request.grid is None:
        own = find_only_axis(source.placements.values())
        names = naming.meshes[0] if naming.meshes else (own,) if own else None
        return MeshGrid((request.world_size,), names, request.device)
    if naming.meshes and request.grid.names not in naming.meshes:
        known = (",".join(f"{name}=N" for name in names) for names in naming.meshes)
        raise UsageError(
            f"--mesh {request.grid}",
            "is not a mesh under which verl reads its files",
            f"pass {' or '.join(known)}, or write --to fsdp2",
        )
    return request.grid


def _lay_out_state_dicts(state: WritableState, request: Request) -> Skeleton:
    if request.state_dict_type == "unsharded":
        return hf_trainer.lay_out_unsharded(state, request)
    if request.state_dict_type == "full":
        return rank_files.lay_out_fsdp1_full(state, request)
    if request.state_dict_type == "sharded":
        return dcp.lay_out_fsdp(state, request)
    raise UsageError(
        "--state-dict-type local",
        "is not a state dict type from which the Trainer resumes",
        "choose sharded, full or unsharded",
    )


def _note_changes_for_accelerate(state: WritableState, request: Request) -> tuple[str, ...]:
    if request.weights_only:
        return ()
    copied = {Path(name).stem for name in state.manifest.train.kept_files}
    schedule = schedules.describe_changes(state.manifest, request.world_size)
    return (*schedule, *_describe_changes(state, *_BY_ACCELERATE, copied=copied))


def _note_changes(state: WritableState, request: Request, *storable: str) -> tuple[str, ...]:
    # The report itself lists what is dropped with the optimizer (`Writer.keeps_value`).
    return () if request.weights_only else _describe_changes(state, *storable)


def _describe_changes(
    state: WritableState, *storable: str, copied: Container[str] = ()
) -> tuple[str, ...]:
    # ``copied``: the parts that are copied as files of their own.
    train = state.manifest.train
    files = {n: path for n, path in train.kept_files.items() if Path(n).stem not in copied}
    described = {Path(name).stem for name in files} if storable else set[str]()
    is_unfit = schedules.is_deepspeeds(train.scheduler)
    held = [part for part in storable if part != "scheduler" or not is_unfit]
    lost = [
        f"not copied: {name}"
        for name in torch_state_dict.list_dropped(train, held if storable else None)
        if name not in copied and name not in described
    ]
    lost += copied_files.describe_lost(files)
    derived = (
        torch_state_dict.describe_derived(train) if not storable or "scaler" in storable else []
    )
    return (*derived, *lost, *describe_lost_setup(state))


def _note_cuts(state: WritableState, request: Request) -> Iterator[str]:
    grid, tensor = request.grid, request.tensor
    if grid is not None and tensor is not None:
        yield _describe_tensor_cuts(state, request.model, grid, tensor)
    meshes = {tuple(axis for axis, _ in cuts) for cuts in state.manifest.placements.values()}
    axes = max(meshes, key=len, default=())
    if grid is None and len(axes) > 1:
        named = f", e.g. --mesh {'=N,'.join(axes)}=N" if all(axes) else ""
        yield (
            f"the ranks form a mesh of one axis, those of the source one of {len(axes)}: a program"
            f" with such a mesh needs --mesh{named}"
        )
    if not state.manifest.origin.device:
        device = request.device
        yield f"the mesh of the new run must be on {device} (--device): the source names none"


def _note_plain(state: WritableState, request: Request, keyword: str) -> Iterator[str]:
    """Yield a note on the trained parameters that every rank's file has as a plain tensor."""
    is_divided = build_is_divided(state, request.model)
    trained = (member.weight for member in state.members)
    plain = [weight.fqn for weight in trained if weight.shape and not is_divided(weight)]
    if plain:
        yield (
            f"{abridge(plain)}: plain tensors on each rank, as in the source, whose run did"
            f" not shard them; the new run must ignore the same parameters ({keyword})"
        )


def _note_idle(state: WritableState, request: Request) -> Iterator[str]:
    """Yield a note on parameters without a state whose flat parameter has one."""
    if request.model is None or request.orig_params is not None:
        return
    has_state = {member.fqn: bool(member.slots) for member in state.members}
    units = [[f for f in unit.members if f in has_state] for unit in request.model.units]
    idle = [f for unit in units if any(map(has_state.get, unit)) for f in unit if not has_state[f]]
    if idle:
        yield (
            f"the optimizer has no state of {abridge(idle)} (never stepped): zeros at the step of"
            " its flat parameter are written"
        )


def _describe_tensor_cuts(
    state: WritableState, model: ModelShapes | None, grid: MeshGrid, tensor: TensorPlan
) -> str:
    weights = torch_state_dict.build_weights(state, divided=build_is_divided(state, model))
    touched = rank_files.find_tensor_cuts(grid, tensor, weights)
    parameters = {value.owner for value in weights.values() if value.divided}
    cut = sum(dim is not None for dim in touched.values())
    counts = f"{cut} of {len(parameters)} parameters cut, {len(touched) - cut} replicated"
    apart = f"{len(parameters) - len(touched)} match no pattern: stored whole on each of its ranks"
    return f"tensor parallel by the plan of {tensor.source}: {counts}, {apart}"
