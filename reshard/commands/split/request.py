"""The options of an output, resolved: the user's, else the values of the source; its stamp."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from operator import attrgetter

from reshard.commands.split.options import SplitOptions
from reshard.core import counts, dtypes
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import Manifest
from reshard.core.stamps import Save
from reshard.errors import UsageError
from reshard.formats import registry
from reshard.formats.base import Writer
from reshard.formats.registry import list_writers_using
from reshard.formats.request import Request
from reshard.formats.target_options import TargetOptions
from reshard.layouts import mesh, tensor_parallel
from reshard.layouts.mesh import MeshGrid
from reshard.layouts.model_parallel import sizes
from reshard.layouts.model_parallel.sizes import ONE, Sizes
from reshard.layouts.tensor_parallel import TensorPlan
from reshard.model import ModelShapes
from reshard.options import options_of
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.training import trainer_run
from reshard.training.companion_files import describe_beside
from reshard.training.state import WritableState

_ID = 32  # characters of a save's id
_SAMPLES, _SAMPLE_BYTES = 4, 4096  # samples of each file without checksums
# What the ids of all outputs state of a request, as name or name=field: the names stay as they are
# if a field gets another one, and an option that is added is not among them.
_STATED = (
    *("described", "device", "dtype", "engine_config=live.config", "file", "fsdp_version", "grid"),
    *("live_batch=live.batch", "live_fsdp=live.fsdp", "model", "orig_params", "own=target"),
    *("parallel", "program", "rank_files", "rules", "run", "separate_masters", "state_dict_type"),
    *("tag", "tensor", "weights_only", "world_size", "zero_stage"),
)


def choose_writer(manifest: Manifest, options: SplitOptions) -> Writer:
    """Return the writer that the user names, else the one that keeps the layout of the source.

    Raises:
        UsageError: there is no such writer; or none is named, and none keeps the layout.
    """
    source = registry.describe_source(manifest)
    name = options.to or source.writer
    if name is None:
        advice = f"name the layout to write: --to {'|'.join(registry.list_writers())}"
        is_one = len(manifest.files) == 1
        if (is_one or source.is_whole) and manifest.origin.world == 1:
            files = "this file" if is_one else "these files"
            whole = f"its program loads {files} on any number of ranks; for another program, "
            below = manifest.checkpoint_below
            advice = (f"pass {below} for its state; " if below else "") + whole + advice
        raise UsageError(
            manifest.origin.path,
            f"is a {manifest.origin.format} checkpoint, whose layout split does not keep",
            advice,
        )
    return registry.find_writer(name)


def resolve_request(
    manifest: Manifest, shapes: ModelShapes | None, writer: Writer, options: SplitOptions
) -> Request:
    """Return the options of the output, complete except for what its writer decides.

    Raises:
        UsageError: an option has no effect on the layout, or a value that it cannot have.
    """
    _check_options(writer, options)
    device = options.device or manifest.origin.device or "cuda"
    grid = _parse_mesh(options, device)
    parallel = _choose_sizes(manifest, writer, options)
    ranks_before = manifest.origin.world if writer.has_data_parallel_ranks else 1
    given = {"--pp": options.pp, "--cp": options.cp, "--tp": options.tp}
    used = {"--pp": parallel.pipeline, "--cp": parallel.context, "--tp": parallel.tensor}
    kept = {flag: size for flag, size in used.items() if size > 1 and given[flag] is None}
    world_size = sizes.choose_world_size(
        parallel, options.world_size, options.dp, ranks_before, kept
    )
    world_size = grid.world if grid else world_size
    if not 1 <= world_size <= counts.MOST:
        raise UsageError(f"--world-size {world_size}", f"must be from 1 to {counts.MOST} ranks")
    run = trainer_run.read(manifest.train.trainer_state, manifest.origin.path)
    separate_masters = writer.has_separate_masters(manifest, options)
    request = Request(
        world_size=world_size,
        parallel=parallel,
        zero_stage=writer.choose_stage(options.zero_stage, manifest.origin.zero_stage),
        dtype=_choose_dtype(options, separate_masters=separate_masters),
        weights_only=options.without_optimizer,
        weights_option=options.weights_option,
        state_dict_type=(options.state_dict_type or writer.choose_state_dict_type(manifest, run)),
        rank_files=options.rank_files,
        run=run,
        keeps_layout=options.to is None,
        fsdp_version=options.fsdp_version,
        orig_params=dtypes.parse_float("--use-orig-params", options.use_orig_params),
        separate_masters=separate_masters,
        model=shapes,
        model_hint=options.model,
        rng=options.rng,
        device=device,
        grid=grid,
        tensor=_choose_tensor_plan(manifest, grid, shapes, options),
        rules=options.rules,
    )
    return writer.resolve(request, manifest, options)


def _check_options(writer: Writer, options: SplitOptions) -> None:
    for option in options_of(TargetOptions):
        using = list_writers_using(option.name)
        is_given = getattr(options, option.name) != option.default
        if is_given and using and writer.name not in using:
            raise UsageError(
                option.flags[0],
                f"has no effect with --to {writer.name}",
                f"leave it out; it is an option of --to {'|'.join(using)}",
            )


def _choose_sizes(manifest: Manifest, writer: Writer, options: SplitOptions) -> Sizes:
    keeps = manifest.origin.format in writer.keeps_grid_of
    own = sizes.parse_mesh(manifest.origin.mesh) if keeps else ONE
    return Sizes(
        tensor=options.tp or own.tensor,
        pipeline=options.pp or own.pipeline,
        expert=options.ep or own.expert,
        # Whole experts stay whole; experts that are cut are cut over the new tensor-parallel ranks.
        expert_tensor=options.etp or (1 if own.expert_tensor == 1 else None),
        context=options.cp or (own.context if "cp" in writer.options else 1),
    )


def _parse_mesh(options: SplitOptions, device: str) -> MeshGrid | None:
    if options.mesh is None:
        return None
    grid, option = mesh.parse_mesh(options.mesh, device), f"--mesh {options.mesh}"
    if options.world_size not in (None, grid.world):
        raise UsageError(
            option, f"has {grid.world} ranks", f"leave out --world-size {options.world_size}"
        )
    return grid


def _choose_tensor_plan(
    manifest: Manifest, grid: MeshGrid | None, model: ModelShapes | None, options: SplitOptions
) -> TensorPlan | None:
    if grid is None or "tensor" not in grid.roles:
        if options.tp_plan is not None:
            raise UsageError(f"--tp-plan {options.tp_plan}", "needs --mesh with an axis tp=N")
        return None
    if options.tp_plan is not None:
        return tensor_parallel.read(as_path(options.tp_plan), model)
    stored = tensor_parallel.get_stored_plan(manifest.origin.path, manifest.placements)
    if stored is not None:
        return stored
    if model is None:
        model = describe_beside(manifest)
    return tensor_parallel.get_declared_plan(model) if model else None


def _choose_dtype(options: SplitOptions, *, separate_masters: bool) -> DType | None:
    """Return the dtype of the weights; an optimizer that updates them in place starts in fp32."""
    in_place = options.init_optimizer == "zeros" and not separate_masters
    return dtypes.parse_float("--dtype", options.dtype) or (FLOAT32 if in_place else None)


def identify_save(state: WritableState, request: Request, writer: Writer) -> Save:
    """Return the stamp of the files to write.

    The id is a digest of the source and of what is written, so that the same command writes the
    same bytes: names, sizes and stored checksums of the source's files, the tensors and the layout.
    Files without checksums (safetensors) of two runs have the same names and sizes; a sample of
    their bytes distinguishes them. For computed values, it includes how they are computed: means of
    the same files with other factors are another save.
    """
    manifest, digest = state.manifest, hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(repr(values).encode())

    add(manifest.origin.format, manifest.train.step, writer.name, *_list_layout_options(request))
    for path, file in sorted(manifest.files.items()):
        add(as_path(path).name, file.nbytes)
        for record in file.records:
            digest.update(b"%d %d " % (record.nbytes, record.crc32 or 0))
    for sample in _sample_unchecked_files(manifest):
        digest.update(sample)
    for entry in manifest.entries.values():
        add(entry.kind, entry.fqn, entry.dtype.name, entry.shape)
        if entry.chunks and isinstance(entry.chunks[0].file, Derived):
            add(entry.chunks[0].file.detail)
    for group in state.groups:
        add(sorted(group.hyper, key=str), len(group.members))
    has_step = manifest.train.step is not None or manifest.train.optimizer_step
    return Save(digest.hexdigest()[:_ID], state.step if has_step else None)


def _sample_unchecked_files(manifest: Manifest) -> Iterator[bytes]:
    with SourceFiles(manifest.files) as pool:
        for path, file in sorted(manifest.files.items()):
            if file.lasting and not any(record.crc32 for record in file.records):
                length = min(_SAMPLE_BYTES, file.nbytes)
                for number in range(1, _SAMPLES + 1):  # the first bytes are a header
                    start = (file.nbytes - length) * number // _SAMPLES
                    yield pool.read(path, start, length)


def _list_layout_options(request: Request) -> Iterator[object]:
    for stated in _STATED:
        name, _, field = stated.partition("=")
        value = attrgetter(field or name)(request)
        if isinstance(value, (bool, int, str, Sizes, DType, MeshGrid, type(None))):
            yield name, str(value)
