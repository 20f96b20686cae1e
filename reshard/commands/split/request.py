"""What a split is to write: the user's choices, and the source's own where there are none."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from reshard import dtypes
from reshard.commands.split import for_megatron
from reshard.commands.split.options import SplitOptions, targets_using
from reshard.dtypes import FLOAT32, DType
from reshard.errors import UsageError
from reshard.formats import targets
from reshard.formats.deepspeed.write import grid as deepspeed_grid
from reshard.formats.target_options import StateDictType
from reshard.formats.targets import Target
from reshard.formats.targets.request import Request
from reshard.layout import mesh, tensor_parallel
from reshard.layout.mesh import MeshGrid
from reshard.layout.tensor_parallel import Plan
from reshard.manifest import Manifest
from reshard.model import ModelHint, ModelShapes
from reshard.model_parallel import sizes
from reshard.model_parallel.sizes import ONE, Sizes
from reshard.paths import as_path
from reshard.training import trainer_run
from reshard.training.companion_files import config_beside
from reshard.training.trainer_run import Run

_FAMILY = {  # what a source is written as, where the user names no target
    "deepspeed": "deepspeed",
    "deepspeed-universal": "deepspeed",
    "dcp": "dcp",
    "torchtitan": "dcp",
    "verl": "verl",
    "accelerate": "accelerate",
    trainer_run.NAME: trainer_run.NAME,
    "hf-trainer": "hf-trainer",
    "fsdp": "fsdp2",
    "megatron": "megatron",
    "meta": "meta",
    "nanotron": "nanotron",
    "colossalai": "colossalai",
}
_STAGE = 2  # of a source that knows none
_FSDP = ("dcp", "fsdp", "torchtitan", "verl")  # formats of sharded training without DeepSpeed


def without_optimizer(manifest: Manifest, options: SplitOptions) -> tuple[SplitOptions, list[str]]:
    """Return the options for weights alone where the source has nothing else, and what to say.

    Targets that need an optimizer keep the options: the user must then choose what becomes of it.
    """
    target = targets.TARGETS.get(options.to or _FAMILY.get(manifest.origin.format, ""))
    asked = options.init_optimizer or options.weights_only or options.param_groups
    held = manifest.has_optimizer or manifest.unnamed_optimizers or manifest.train.param_groups
    if asked or held or target is None or not target.weights_alone:
        return options, []
    said = "weights only: the source has no optimizer state (--init-optimizer zeros starts an Adam)"
    return replace(options, init_optimizer="none"), [said]


def requested(
    manifest: Manifest, shapes: ModelShapes | None, options: SplitOptions
) -> tuple[Request, Target]:
    """What is to be written, and as what.

    Args:
        shapes: the model, where it is known.

    Raises:
        UsageError: no such target, or no telling which; or a choice that it has no use for.
    """
    name = options.to or _FAMILY.get(manifest.origin.format)
    if name is None:
        raise UsageError(
            manifest.origin.path,
            f"is a {manifest.origin.format} checkpoint, which is not split",
            f"say what to write: --to {'|'.join(targets.NAMES)}",
        )
    target = targets.TARGETS[name]
    _check_heeded(target, options)
    grid = _grid(options)
    parallel = _parallel(manifest, target, options)
    before = manifest.origin.world if name != "meta" else 1
    world_size = sizes.world_size(parallel, options.world_size, options.dp, before)
    world_size = grid.world if grid else world_size
    run = trainer_run.read(manifest.train.trainer_state, manifest.origin.path)
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}", "at least one rank is needed")
    deepspeed = name == "deepspeed" or (
        name == "hf-trainer" and _holds_deepspeed(manifest, options)
    )
    return (
        Request(
            world_size=world_size,
            parallel=parallel,
            zero_stage=_stage(manifest, name, options),
            dtype=_weight_dtype(options, deepspeed=deepspeed),
            weights_only=options.without_optimizer,
            state_dict_type=_state_dict_type(name, manifest, options, run),
            rank_files=options.rank_files or _keeps_rank_files(options, run),
            run=run,
            fsdp_version=options.fsdp_version,
            orig_params=_dtype("--use-orig-params", options.use_orig_params),
            deepspeed=deepspeed,
            model=shapes or _model_of(manifest, run, name),
            device=options.device,
            grid=grid,
            tensor=_tensor_plan(manifest, grid, shapes, options),
            deepspeed_grid=(
                deepspeed_grid.Wanted(
                    sizes=parallel,
                    stage_layers=for_megatron.stage_layers(options),
                    divisible=options.make_vocab_size_divisible_by,
                    rules=options.rules,
                    experts=options.ep,
                )
                if name in ("deepspeed", "ds-universal")
                else None
            ),
            megatron=(
                for_megatron.wanted(manifest, options, parallel, world_size)
                if name == "megatron"
                else None
            ),
        ),
        target,
    )


def _holds_deepspeed(manifest: Manifest, options: SplitOptions) -> bool:
    """Whether HF Trainer's checkpoint is one of DeepSpeed: asked for, or as the source is."""
    if options.zero_stage is not None:
        if options.state_dict_type is not None:
            raise UsageError("--zero-stage", "and --state-dict-type exclude each other there")
        return True
    return options.state_dict_type is None and manifest.origin.format.startswith("deepspeed")


def _keeps_rank_files(options: SplitOptions, run: Run | None) -> bool:
    """Return whether a run of our trainer goes on with a file a rank."""
    kept = options.to in (None, trainer_run.NAME) and options.state_dict_type is None
    return kept and run is not None and run.has_rank_files


def _model_of(manifest: Manifest, run: Run | None, target: str) -> ModelShapes | None:
    """Return the model whose flat parameters a run of our trainer has, by the config beside it."""
    if run is None or target != trainer_run.NAME or not run.is_flat:
        return None
    config = config_beside(manifest)
    return ModelHint(str(config), run.wrap).shapes() if config else None


def _state_dict_type(
    target: str, manifest: Manifest, options: SplitOptions, run: Run | None
) -> StateDictType:
    """Return what was asked for, else the source's: whole files become whole files."""
    if options.state_dict_type is not None:
        return options.state_dict_type
    if target == trainer_run.NAME and run is not None:
        return run.form
    if manifest.origin.format in _FSDP:
        return "sharded"
    if any(path.endswith("pytorch_model_fsdp.bin") for path in manifest.files):
        return "full"
    of_fsdp = any("pytorch_model_fsdp" in path for path in manifest.files)
    of_ddp = target == "hf-trainer" or target == manifest.origin.format == "accelerate"
    return "unsharded" if of_ddp and not of_fsdp else "sharded"


def _check_heeded(target: Target, options: SplitOptions) -> None:
    """Refuse a choice that would change nothing.

    Raises:
        UsageError: naming it, and the targets that it is for.
    """
    for field in fields(SplitOptions):
        heeding = targets_using(field.name)
        given = getattr(options, field.name) != field.default
        if given and heeding and target.name not in heeding:
            raise UsageError(
                f"--{field.name.replace('_', '-')}",
                f"changes nothing of --to {target.name}",
                f"leave it out; it is for --to {'|'.join(heeding)}",
            )


def _parallel(manifest: Manifest, target: Target, options: SplitOptions) -> Sizes:
    """What was asked for; else the source's own, where it is written as what it is."""
    stays = _FAMILY.get(manifest.origin.format) == target.name and "tp" in target.heeds
    stays = stays or (manifest.origin.format, target.name) == ("deepspeed", "ds-universal")
    own = sizes.of_mesh(manifest.origin.mesh) if stays else ONE
    return Sizes(
        tensor=options.tp or own.tensor,
        pipeline=options.pp or own.pipeline,
        expert=options.ep or own.expert,
    )


def _grid(options: SplitOptions) -> MeshGrid | None:
    """The mesh that was asked for.

    Raises:
        UsageError: it has another number of ranks than was asked for.
    """
    if options.mesh is None:
        return None
    grid, option = mesh.parse_mesh(options.mesh, options.device), f"--mesh {options.mesh}"
    if options.world_size not in (None, grid.world):
        raise UsageError(
            option, f"has {grid.world} ranks", f"leave out --world-size {options.world_size}"
        )
    return grid


def _tensor_plan(
    manifest: Manifest, grid: MeshGrid | None, model: ModelShapes | None, options: SplitOptions
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
        return tensor_parallel.read(as_path(options.tp_plan), model)
    if model is None:
        config = config_beside(manifest)
        model = ModelHint(str(config)).shapes() if config else None
    return tensor_parallel.of_model(model) if model else None


def _stage(manifest: Manifest, target: str, options: SplitOptions) -> int:
    if options.zero_stage is not None:
        return options.zero_stage
    said = manifest.origin.detail.removeprefix("ZeRO stage ")
    if target == "nanotron":  # it has 0 and 1; its reader names a stage where there is one
        return min(int(said), 1) if said.isdecimal() else 0
    if said.isdecimal():
        return int(said)
    is_universal = manifest.origin.format == "deepspeed-universal"
    return _configured_stage(manifest.train.config) if is_universal else _STAGE


def _configured_stage(config: Any) -> int:
    """The stage of the run that a universal checkpoint was made from."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if isinstance(stage, int) and stage in range(4) else _STAGE


def _weight_dtype(options: SplitOptions, *, deepspeed: bool) -> DType | None:
    """The dtype of the weights; PyTorch's optimizers update them in place, so masters are fp32."""
    in_place = options.init_optimizer == "zeros" and not deepspeed
    return _dtype("--dtype", options.dtype) or (FLOAT32 if in_place else None)


def _dtype(option: str, text: str | None) -> DType | None:
    if text is None:
        return None
    dtype = dtypes.parse(text)
    if dtype.family != "float":
        raise UsageError(f"{option} {text}", "must be bf16, fp16 or fp32")
    return dtype
