"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import commit, dtypes, formats, keys, tensor_parallel, weights
from reshard.commands.batch import rebalanced
from reshard.commands.companions import config_beside, with_companions
from reshard.commands.inspect import Inspection
from reshard.commands.output import (
    OutputOptions,
    check_places,
    opened,
    write,
)
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter, one_of
from reshard.commands.split_report import SplitReport, describe
from reshard.dtypes import DType
from reshard.errors import DifferentError, IncompleteError, UsageError
from reshard.files import SourceFiles
from reshard.formats import targets
from reshard.formats.state_dict import mesh
from reshard.formats.state_dict.mesh import Grid
from reshard.formats.targets import Request, Target
from reshard.formats.training import Training, training
from reshard.manifest import Manifest, Skeleton
from reshard.model import ModelShapes, Told
from reshard.plan import plan
from reshard.tensor_parallel import Plan

if TYPE_CHECKING:
    from reshard.html.page import Page

_FAMILY = {  # what a source is written as, where the user names no target
    "deepspeed": "deepspeed",
    "deepspeed-universal": "deepspeed",  # as it is, it fits any number of ranks
    "dcp": "dcp",
    "torchtitan": "dcp",
    "verl": "verl",
    "accelerate": "accelerate",
    "hf-trainer": "accelerate",
    "fsdp": "fsdp2",
}
_STAGE = 2  # of a source that knows none


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions(OutputOptions):
    """What a split can be asked for."""

    world_size: int | None = None  # None: the source's
    to: str | None = None  # one of `targets.NAMES`; None: as the source
    zero_stage: int | None = None  # None: the source's, else 2
    state_dict_type: targets.StateDictType | None = None  # of FSDP; None: the source's
    rank_files: bool = False  # of FSDP: a file a rank instead of DCP
    fsdp_version: targets.FsdpVersion = 2  # of verl's files
    use_orig_params: str | None = None  # FSDP 1: the dtype of the forward pass; None: flat
    dtype: str | None = None  # of the module's copy; None: as trained
    weights_only: bool = False
    device: str = "cuda"  # of the mesh in DTensor files
    mesh: str | None = None  # NAME=SIZE,... of DTensor files; None: one axis of all ranks
    tp_plan: str | Path | None = None  # how its tensor-parallel axis cuts; None: the model's plan

    def __post_init__(self) -> None:
        """Refuse a choice that there is not.

        Raises:
            UsageError: naming the choices.
        """
        OutputOptions.__post_init__(self)
        if self.zero_stage is not None:
            one_of("zero_stage", self.zero_stage, range(4))
        if self.state_dict_type is not None:
            one_of("state_dict_type", self.state_dict_type, targets.STATE_DICT_TYPES)
        one_of("fsdp_version", self.fsdp_version, targets.FSDP_VERSIONS)
        if self.to is not None:
            one_of("to", self.to, targets.NAMES)


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
    check_page(options, sources, destination)
    manifest = opened(sources, destination, options, is_directory=True)
    manifest = keys.edit(manifest, keys.Edits()).manifest
    if manifest.absent:
        raise IncompleteError(
            manifest.origin.path,
            f"lists {manifest.absent[0]!r}, but no rank holds a value for it",
            "save it without exclude_frozen_parameters, or write the rest with reshard merge",
        )
    request, target = _request(manifest, options)
    config, batch_notes = rebalanced(manifest, request.data_parallel)
    manifest = replace(manifest, train=replace(manifest.train, config=config))
    with SourceFiles() as pool:
        manifest = weights.with_equal_heads_tied(manifest, pool)
    state = training(manifest, weights_only=options.weights_only)
    skeleton = with_companions(target.lay_out(state, request), manifest, tagged=target.tagged)
    check_places(skeleton)
    planned = plan(manifest.entries, skeleton, options.budget()[1])
    report = describe(state, request, target, skeleton, planned)
    report.destination = report_as
    report.derived += batch_notes
    if options.dry_run:
        write_page(options, lambda: _page(report, manifest, skeleton))
        return report
    commit.check_space(destination, report.bytes_written)
    outcome = write(
        planned,
        skeleton,
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
    write_page(options, lambda: _page(report, manifest, skeleton))
    return report


def _page(report: SplitReport, manifest: Manifest, skeleton: Skeleton) -> Page:
    from reshard.html import pages

    return pages.written(report.to_json(), Inspection(manifest).to_json(), manifest, skeleton)


def _request(manifest: Manifest, options: SplitOptions) -> tuple[Request, Target]:
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
    target = targets.TARGETS[name]
    grid = _grid(target, options)
    world_size = options.world_size or int(manifest.origin.mesh.get("world", 1))
    world_size = grid.world if grid else world_size
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}", "at least one rank is needed")
    model = Told(options.model, options.wrap).shapes() if options.model else None
    return (
        Request(
            world_size=world_size,
            zero_stage=_stage(manifest, options),
            dtype=_dtype("--dtype", options.dtype),
            weights_only=options.weights_only,
            state_dict_type=options.state_dict_type or _state_dict_type(manifest),
            rank_files=options.rank_files,
            fsdp_version=options.fsdp_version,
            orig_params=_dtype("--use-orig-params", options.use_orig_params),
            model=model,
            device=options.device,
            grid=grid,
            tensor=_tensor_plan(manifest, grid, model, options),
        ),
        target,
    )


def _grid(target: Target, options: SplitOptions) -> Grid | None:
    """The mesh that was asked for.

    Raises:
        UsageError: the target has none, or it has another number of ranks than was asked for.
    """
    if options.mesh is None:
        return None
    grid, option = mesh.parse(options.mesh, options.device), f"--mesh {options.mesh}"
    if not target.has_mesh:
        raise UsageError(
            option,
            f"--to {target.name} writes no files of a mesh",
            "leave it out: any mesh reads DCP, and the others know only the number of ranks; or"
            " write --to fsdp2",
        )
    if options.world_size not in (None, grid.world):
        raise UsageError(
            option, f"has {grid.world} ranks", f"leave out --world-size {options.world_size}"
        )
    return grid


def _tensor_plan(
    manifest: Manifest, grid: Grid | None, model: ModelShapes | None, options: SplitOptions
) -> Plan | None:
    """How a tensor-parallel axis cuts: the user's plan, else that of the model.

    Raises:
        UsageError: there is a plan and no such axis, or nothing says what the axis does.
    """
    if grid is None or "tensor" not in grid.roles:
        if options.tp_plan is not None:
            raise UsageError(f"--tp-plan {options.tp_plan}", "needs --mesh with an axis tp=N")
        return None
    if options.tp_plan is not None:
        return tensor_parallel.read(Path(options.tp_plan), model)
    if model is None:
        config = config_beside(manifest)
        model = Told(str(config)).shapes() if config else None
    return tensor_parallel.of_model(model) if model else None


def _stage(manifest: Manifest, options: SplitOptions) -> int:
    if options.zero_stage is not None:
        return options.zero_stage
    said = manifest.origin.detail.removeprefix("ZeRO stage ")
    if said.isdecimal():
        return int(said)
    is_universal = manifest.origin.format == "deepspeed-universal"
    return _configured_stage(manifest.train.config) if is_universal else _STAGE


def _configured_stage(config: Any) -> int:
    """The stage of the run that a universal checkpoint was made from."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if isinstance(stage, int) and stage in range(4) else _STAGE


def _state_dict_type(manifest: Manifest) -> targets.StateDictType:
    """Whole files become whole files."""
    origin = manifest.origin
    return "full" if origin.format == "accelerate" and origin.detail == "state dict" else "sharded"


def _dtype(option: str, text: str | None) -> DType | None:
    if text is None:
        return None
    dtype = dtypes.parse(text)
    if dtype.family != "float":
        raise UsageError(f"{option} {text}", "must be bf16, fp16 or fp32")
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
