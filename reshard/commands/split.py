"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path, PurePosixPath

from reshard import commit, dtypes, formats, keys, weights
from reshard.commands import split_rng
from reshard.commands.batch import rebalanced
from reshard.commands.companions import with_companions
from reshard.commands.output import Meter, check_places, opened, write
from reshard.commands.split_options import SplitOptions
from reshard.commands.split_report import SplitReport, describe
from reshard.commands.split_state import is_weights, made_state, stored, told
from reshard.dtypes import FLOAT32, DType
from reshard.errors import DifferentError, IncompleteError, UsageError
from reshard.files import SourceFiles
from reshard.formats import hf_trainer, targets
from reshard.formats.targets import Request, Target
from reshard.formats.training import Training
from reshard.manifest import Manifest, Skeleton
from reshard.model import ModelShapes
from reshard.plan import plan

_FAMILY = {  # what a source is written as, where the user names no target
    "deepspeed": "deepspeed",
    "deepspeed-universal": "deepspeed",
    "dcp": "dcp",
    "torchtitan": "dcp",
    "verl": "verl",
    "accelerate": "accelerate",
    "hf-trainer": "hf-trainer",
    "fsdp": "fsdp2",
}
_FSDP = ("dcp", "fsdp", "torchtitan", "verl")  # formats of sharded training without DeepSpeed


def split(
    source: formats.Paths,
    destination: str | Path,
    options: SplitOptions | None = None,
    meter: Meter | None = None,
) -> SplitReport:
    """Write the training state of ``source`` for another number of ranks, or in another layout.

    Raises:
        ReshardError: see its subclasses; nothing is left at the destination then.
    """
    options = options or SplitOptions()
    began = time.perf_counter()
    sources, report_as = formats.as_paths(source), str(destination)
    destination = Path(destination).resolve()
    manifest = opened(sources, destination, options, is_directory=True)
    manifest = keys.edit(manifest, keys.Edits()).manifest
    if manifest.absent:
        raise IncompleteError(
            manifest.origin.path,
            f"lists {manifest.absent[0]!r}, but no rank holds a value for it",
            "save it without exclude_frozen_parameters, or write the rest with reshard merge",
        )
    manifest, shapes = told(manifest, options)
    request, target = _request(manifest, shapes, options)
    batch_notes: list[str] = []
    if not is_weights(manifest):
        manifest, batch_notes = rebalanced(manifest, request.world_size)
    with SourceFiles() as pool:
        manifest = weights.with_equal_heads_tied(manifest, pool)
    states = split_rng.chosen(manifest, request, target, options)
    state, made = made_state(manifest, request, options)
    state = replace(state, rng=states.states)
    skeleton = _with_companions(target.lay_out(state, request), state, target)
    check_places(skeleton)
    held = stored(skeleton, state)
    planned = plan(manifest.entries, held, options.budget()[1])
    report = describe(state, request, target, skeleton, planned)
    report.destination = report_as
    report.derived += [*made, *batch_notes]
    states.tell(report)
    if options.dry_run:
        return report
    commit.check_space(destination, report.bytes_written)
    outcome = write(
        planned,
        held,
        manifest,
        destination,
        options,
        is_directory=True,
        look=lambda staging: _look(staging, skeleton, state, options),
        meter=meter,
    )
    report.overflowed = dict(outcome.overflowed)
    report.verified = options.verify
    report.done = True
    report.seconds = time.perf_counter() - began
    return report


def _request(
    manifest: Manifest, shapes: ModelShapes | None, options: SplitOptions
) -> tuple[Request, Target]:
    """What is to be written, with the source's own choices where the user made none.

    Raises:
        UsageError: no such target, or no telling which.
    """
    name = options.to or _FAMILY.get(manifest.origin.format)
    if name is None:
        raise UsageError(
            manifest.origin.path,
            f"is a {manifest.origin.format} checkpoint, which is not split",
            f"say what to write: --to {'|'.join(targets.NAMES)}",
        )
    world_size = options.world_size or int(manifest.origin.mesh.get("world", 1))
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}", "at least one rank is needed")
    deepspeed = name == "deepspeed" or (
        name == "hf-trainer" and _holds_deepspeed(manifest, options)
    )
    return (
        Request(
            world_size=world_size,
            zero_stage=_stage(manifest, options),
            dtype=_dtype(options, deepspeed=deepspeed),
            weights_only=options.without_optimizer,
            state_dict_type=_state_dict_type(name, manifest, options),
            deepspeed=deepspeed,
            model=shapes,
            device=options.device,
        ),
        targets.TARGETS[name],
    )


def _holds_deepspeed(manifest: Manifest, options: SplitOptions) -> bool:
    """Whether HF Trainer's checkpoint is one of DeepSpeed: asked for, or as the source is."""
    if options.zero_stage is not None:
        if options.state_dict_type is not None:
            raise UsageError("--zero-stage", "and --state-dict-type exclude each other there")
        return True
    return options.state_dict_type is None and manifest.origin.format.startswith("deepspeed")


def _state_dict_type(
    target: str, manifest: Manifest, options: SplitOptions
) -> targets.StateDictType:
    """What was asked for; HF Trainer's is otherwise as the source, all else sharded."""
    if options.state_dict_type is not None:
        return options.state_dict_type
    if target != "hf-trainer" or manifest.origin.format in _FSDP:
        return "sharded"
    if any(path.endswith("pytorch_model_fsdp.bin") for path in manifest.files):
        return "full"
    of_fsdp = any("pytorch_model_fsdp" in path for path in manifest.files)
    return "sharded" if of_fsdp else "unsharded"


def _with_companions(skeleton: Skeleton, state: Training, target: Target) -> Skeleton:
    """What lies beside the state files goes beside them; above a tag's directory, above it."""
    if target.name == "hf-trainer":
        inside = hf_trainer.directory(state)
        return with_companions(skeleton, state.manifest, beside=inside, above=inside)
    tagged = target.name == "deepspeed"
    within = str(PurePosixPath(skeleton.files[-1].name).parent) if tagged else ""
    return with_companions(skeleton, state.manifest, beside=within)


def _stage(manifest: Manifest, options: SplitOptions) -> int:
    if options.zero_stage is not None:
        return options.zero_stage
    said = manifest.origin.detail.removeprefix("ZeRO stage ")
    return int(said) if said.isdecimal() else 2


def _dtype(options: SplitOptions, *, deepspeed: bool) -> DType | None:
    """The dtype of the weights; PyTorch's optimizers update them in place, so masters are fp32."""
    if options.dtype is None:
        in_place = options.init_optimizer == "zeros" and not deepspeed
        return FLOAT32 if in_place else None
    dtype = dtypes.parse(options.dtype)
    if dtype.family != "float":
        raise UsageError(f"--dtype {options.dtype}", "weights are written as bf16, fp16 or fp32")
    return dtype


def _look(staging: Path, skeleton: Skeleton, state: Training, options: SplitOptions) -> None:
    """Read the output as a stranger would: its reader must find what was planned, and all of it.

    Raises:
        DifferentError: it is something else.
    """
    seen = formats.read(staging, model=options.model, wrap=options.wrap)
    planned = {
        (str(staging / chunk.file), chunk.byte_offset, chunk.dtype): entry.fqn
        for entry in skeleton.entries
        for chunk in entry.chunks
        if chunk.box.volume
    }
    found = {
        (chunk.file, chunk.byte_offset, chunk.dtype): entry.fqn
        for entry in seen.entries.values()
        for chunk in entry.chunks
        if chunk.box.volume
    }
    tied = state.manifest.tied
    for place, fqn in found.items():
        if planned.get(place) not in (fqn, tied.get(fqn)):
            raise DifferentError(
                place[0], f"holds {fqn!r} at byte {place[1]}, where {planned.get(place)!r} was put"
            )
    _check_all(seen, state)


def _check_all(seen: Manifest, state: Training) -> None:
    """Every weight and every optimizer slot is there again.

    Raises:
        DifferentError: one is not.
    """
    names = {entry.fqn for entry in seen.entries.values()} | seen.tied.keys()
    slots = {(entry.kind, entry.fqn) for entry in seen.entries.values()}
    for weight in state.weights:
        if weight.fqn not in names:
            raise DifferentError(weight.fqn, "does not read back")
    for group in state.groups:
        for member in group.members:
            for slot, entry in member.slots.items():
                if entry.numel and (slot, member.fqn) not in slots:
                    raise DifferentError(member.fqn, f"its {slot} does not read back")
