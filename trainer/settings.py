"""Every choice, once: its name, type, default and meaning.

The command line is made from these fields (``cli.py``); the configuration files of DeepSpeed and
Accelerate are read into them (``config/``). ``resolve`` fills in what depends on the number of
ranks and refuses contradictions, so that a Settings object is always consistent.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from trainer.errors import SettingsError
from trainer.parallel.grid import Grid

ZERO = ("ddp", "zero1", "zero2", "zero3")
FSDP = ("fsdp", "fsdp2")


def _field(default: Any, meaning: str, *choices: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does. Numbers of bytes, elements, steps and seconds say so in their help."""

    # The run
    steps: int = _field(20, "optimizer steps in all, those before a resume included")
    seed: int = _field(0, "of the initial weights, the data order and dropout")
    nproc: int = _field(1, "ranks; under torchrun or accelerate launch, the world size")
    device: str = _field("auto", "auto is cuda where there is one", "auto", "cpu", "cuda")
    threads: int = _field(1, "CPU threads a rank; the same results need the same number")
    timeout: int = _field(300, "seconds to wait for another rank before giving up")

    # The model and its data
    model: str = _field(
        "tiny-llama", "tiny-llama, tiny-mixtral, tiny-gpt2, a config.json or a model directory"
    )
    data: str | None = _field(None, "a text file (default: Python's own documentation topics)")
    seq_len: int = _field(64, "tokens a sample")
    dropout: float | None = _field(None, "every dropout probability of the model")
    tie_embeddings: bool | None = _field(None, "share input and output embeddings")
    freeze: tuple[str, ...] = _field((), "parameters whose name matches stay as they are (regex)")
    activation_checkpointing: bool = _field(False, "recompute layers in the backward pass")

    # Batches: global_batch = micro_batch x accumulation x data-parallel ranks
    micro_batch: int = _field(1, "samples in one forward pass of one rank")
    accumulation: int = _field(0, "micro batches that a rank adds up before a step (0: follows)")
    global_batch: int = _field(0, "samples a step, all ranks (0: follows)")

    # The optimizer
    lr: float = _field(1e-3, "peak learning rate")
    beta1: float = _field(0.9, "AdamW: decay of the first moment")
    beta2: float = _field(0.999, "AdamW: decay of the second moment")
    eps: float = _field(1e-8, "AdamW: added to the root of the second moment")
    weight_decay: float = _field(0.01, "AdamW: decoupled, per step, times lr")
    param_groups: str = _field(
        "decay", "decay: biases and norms are not decayed; single: one group", "decay", "single"
    )
    clip: float = _field(1.0, "largest global gradient norm (0: no clipping)")
    schedule: str = _field(
        "constant",
        "learning rate schedule, by its name in DeepSpeed",
        "constant",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    )
    warmup_steps: int = _field(10, "steps until the peak")
    warmup_min_lr: float = _field(0.0, "where the warmup starts")
    warmup_type: str = _field("log", "form of the warmup", "log", "linear")
    schedule_steps: int = _field(0, "steps of the whole schedule (0: steps)")
    cos_min_ratio: float = _field(1e-4, "WarmupCosineLR: last rate / peak rate")
    warmup_min_ratio: float = _field(0.0, "WarmupCosineLR: first rate / peak rate")

    # Numbers
    precision: str = _field("bf16", "of the forward and backward pass", "fp32", "bf16", "fp16")
    grad_dtype: str = _field(
        "fp32", "in which gradients are added up and kept", "fp32", "bf16", "fp16"
    )
    loss_scale: float = _field(0.0, "fp16: a fixed scale (0: dynamic)")
    initial_scale_power: int = _field(16, "fp16: dynamic scale starts at 2 to this power")
    loss_scale_window: int = _field(1000, "fp16: good steps before the scale doubles")
    hysteresis: int = _field(2, "fp16: overflows before the scale halves")
    min_loss_scale: float = _field(1.0, "fp16: never below this")
    on_nan: str = _field(
        "stop", "when the loss is not finite: stop, or skip the step", "stop", "skip"
    )

    # How the model is spread over the ranks
    strategy: str = _field("zero2", "what each rank holds", *ZERO, *FSDP)
    engine: str = _field("native", "native, or the real DeepSpeed", "native", "deepspeed")
    tp: int = _field(1, "ranks that cut each layer's matrices (ddp, fsdp2)")
    pp: int = _field(1, "pipeline stages of whole layers (ddp, fsdp2)")
    ep: int = _field(1, "ranks that cut each layer's experts (ddp, fsdp2)")
    pp_schedule: str = _field("1f1b", "of a pipeline's micro batches", "1f1b", "gpipe")
    reduction: str | None = _field(
        None,
        "canonical: the same bits at any number of ranks (default of ddp and ZeRO); fast: as the "
        "collective adds",
        "canonical",
        "fast",
    )
    reduce_bucket_size: int = _field(500_000_000, "ZeRO 2: elements reduced at a time")
    sub_group_size: int = _field(1_000_000_000, "ZeRO 3: elements of one optimizer step")
    persistence_threshold: int = _field(0, "ZeRO 3: parameters of fewer elements stay gathered")
    offload_optimizer: str = _field(
        "none", "ZeRO: where masters and moments live", "none", "cpu", "nvme"
    )
    offload_param: str = _field(
        "none", "ZeRO 3: where parameter shards live", "none", "cpu", "nvme"
    )
    nvme_path: str | None = _field(None, "directory for what is offloaded to disk")

    # FSDP, in the field's words
    fsdp_sharding_strategy: str = _field(
        "FULL_SHARD",
        "FSDP 1; FSDP 2 knows FULL_SHARD, SHARD_GRAD_OP and their hybrids",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    )
    fsdp_hybrid_size: int = _field(0, "HYBRID: ranks of one replica (0: half of them, or all)")
    fsdp_auto_wrap_policy: str = _field(
        "TRANSFORMER_BASED_WRAP",
        "what becomes one unit",
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP",
        "NO_WRAP",
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = _field(
        (), "layer classes (default: the model's own _no_split_modules)"
    )
    fsdp_min_num_params: int = _field(100_000, "SIZE_BASED_WRAP: elements of a unit")
    fsdp_backward_prefetch: str = _field(
        "BACKWARD_PRE", "gather the next unit", "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"
    )
    fsdp_forward_prefetch: bool = _field(False, "gather the next unit in the forward pass too")
    fsdp_use_orig_params: bool = _field(True, "FSDP 1: keep the parameters' names and groups")
    fsdp_sync_module_states: bool = _field(True, "rank 0's weights and buffers go to all")
    fsdp_cpu_ram_efficient_loading: bool = _field(False, "only rank 0 reads the weights")
    fsdp_offload_params: bool = _field(False, "parameters, gradients, optimizer on the CPU")
    fsdp_limit_all_gathers: bool = _field(True, "FSDP 1: at most two gathers in flight")

    # Checkpoints
    save: str | None = _field(None, "run directory (default: the first free run-N)")
    save_every: int = _field(0, "steps between checkpoints (0: only at the end)")
    keep: int = _field(0, "newest checkpoints to keep (0: all)")
    overwrite: bool = _field(False, "replace the checkpoints that are in the run directory")
    state_dict_type: str = _field(
        "sharded",
        "form of FSDP checkpoints; megatron: Megatron-LM's own directory",
        *("full", "local", "sharded", "megatron"),
    )
    sharded_files: str = _field(
        "dcp", "FSDP sharded: a DCP directory, or one pickled file a rank", "dcp", "rank"
    )
    save_16bit_model: bool = _field(False, "write model.safetensors in 16 bits at the end")
    resume: str | None = _field(None, "run directory or checkpoint to go on from")
    tag: str | None = _field(None, "checkpoint of the run directory (default: latest)")

    # What is told
    log: str | None = _field(None, "a JSON line a step goes here")
    progress: bool = _field(True, "progress bar, on a terminal")
    wall_clock_breakdown: bool = _field(False, "where the time of a step goes")
    parameter_hash: bool = _field(True, "SHA-256 of the final parameters")

    @property
    def microbatches(self) -> int:
        """Micro batches of one step, all ranks."""
        return self.accumulation * self.grid.dp

    @property
    def grid(self) -> Grid:
        """The ranks by what each axis divides; all of them are data parallel by default."""
        dp = self.nproc // (self.tp * self.pp * self.ep)
        return Grid(pp=self.pp, dp=dp, ep=self.ep, tp=self.tp)

    @property
    def layout(self) -> str:
        """Whose checkpoints are written: those of DeepSpeed or FSDP."""
        return "DeepSpeed" if self.strategy in ZERO and not self.grid.parallel else "FSDP"

    @property
    def zero_stage(self) -> int:
        """0 for ddp; ZeRO strategies only."""
        return ZERO.index(self.strategy)


def resolve(chosen: dict[str, Any], nproc: int) -> Settings:
    """Settings of a run of ``nproc`` ranks from what was chosen; the rest are defaults.

    Raises:
        SettingsError: choices contradict each other.
    """
    settings = Settings(**{**chosen, "nproc": nproc})
    _check_grid(settings)
    derived: dict[str, Any] = {**_batches(settings, chosen), **_defaults(settings)}
    settings = dataclasses.replace(settings, **derived)
    for check in (_check_numbers, _check_strategy, _check_cut, _check_files):
        check(settings)
    return settings


def _batches(settings: Settings, chosen: dict[str, Any]) -> dict[str, int]:
    """The batch identity; what is not given follows, a micro batch being one sample at first.

    (A micro batch that followed from the number of ranks would be another sum at another number.)
    """
    world = settings.grid.dp
    whole, micro, times = (
        chosen.get(name, 0) for name in ("global_batch", "micro_batch", "accumulation")
    )
    for name in ("global_batch", "micro_batch", "accumulation"):
        if chosen.get(name, 0) < 0:
            raise SettingsError(f"{name} is {chosen[name]}: expected a positive number")
    if whole and times and not micro:
        micro = whole // (times * world)
    micro = micro or Settings.micro_batch
    times = times or (whole // (micro * world) if whole else 1)
    whole = whole or micro * times * world
    if micro * times * world != whole or not micro:
        raise SettingsError(
            f"global batch {whole} is not micro batch {micro} x accumulation {times} "
            f"x {world} {'data-parallel ' if settings.grid.parallel else ''}ranks",
            "give two of --global-batch, --micro-batch and --accumulation that fit the ranks",
        )
    return {"global_batch": whole, "micro_batch": micro, "accumulation": times}


def _defaults(settings: Settings) -> dict[str, Any]:
    """What other choices decide."""
    return {
        "reduction": settings.reduction or default_reduction(settings),
        "schedule_steps": settings.schedule_steps or settings.steps,
    }


def default_reduction(settings: Settings) -> str:
    """Canonical where it is offered."""
    ours = settings.engine == "native" and settings.layout == "DeepSpeed"
    return "canonical" if ours else "fast"


def without_effect(settings: Settings) -> dict[str, str]:
    """Setting -> why it changes nothing in this run."""
    fsdp = settings.strategy in FSDP
    conditions = [
        (settings.precision == "fp16", f"precision is {settings.precision}", _FP16_ONLY),
        (fsdp, f"strategy is {settings.strategy}", _FSDP_ONLY),
        (settings.layout == "FSDP", f"strategy is {settings.strategy}", _FSDP_FILES),
        (settings.pp > 1, "model has one stage", ("pp_schedule",)),
        (settings.strategy == "zero2", f"strategy is {settings.strategy}", ("reduce_bucket_size",)),
        (settings.strategy == "zero3", f"strategy is {settings.strategy}", _ZERO_3_ONLY),
        (settings.schedule != "constant", "schedule is constant", _SCHEDULE_ONLY),
    ]
    return {name: why for holds, why, names in conditions if not holds for name in names}


_FP16_ONLY = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
)
_FSDP_ONLY = tuple(
    field.name for field in dataclasses.fields(Settings) if field.name.startswith("fsdp_")
)
_FSDP_FILES = ("state_dict_type", "sharded_files")
_ZERO_3_ONLY = ("sub_group_size", "persistence_threshold")
_SCHEDULE_ONLY = ("warmup_steps", "warmup_min_lr", "warmup_type", "schedule_steps")

# Lowest and highest value of each number; others are refused.
_BOUNDS = {
    **dict.fromkeys(
        "steps nproc seq_len threads timeout reduce_bucket_size sub_group_size loss_scale_window "
        "hysteresis".split(),
        (1, 10**12),
    ),
    **dict.fromkeys(
        "save_every keep persistence_threshold warmup_steps schedule_steps fsdp_hybrid_size "
        "fsdp_min_num_params".split(),
        (0, 10**15),
    ),
    **dict.fromkeys(
        "lr weight_decay clip eps loss_scale min_loss_scale warmup_min_lr".split(), (0, 1e30)
    ),
    **dict.fromkeys("dropout cos_min_ratio warmup_min_ratio".split(), (0, 1)),
    **dict.fromkeys(("beta1", "beta2"), (0, math.nextafter(1, 0))),
    "threads": (1, 4096),
    "seed": (0, 2**63 - 1),
    "initial_scale_power": (0, 100),
}


def _check_numbers(settings: Settings) -> None:
    for name, (low, high) in _BOUNDS.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise SettingsError(f"{name} is {value}: expected {low} to {high:.15g}")
    for pattern in settings.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(f"freeze {pattern!r} is no regular expression: {error}") from error
    if settings.seq_len < 2:
        raise SettingsError("seq_len is 1: the model predicts the next token, expected 2 or more")
    if settings.grad_dtype not in {"fp32", settings.precision}:
        raise SettingsError(
            f"gradients in {settings.grad_dtype} in a {settings.precision} run",
            f"use --grad-dtype fp32 or {settings.precision}",
        )


def _check_grid(settings: Settings) -> None:
    """The axes must fit the ranks before anything can be derived from them."""
    axes = {"tp": settings.tp, "pp": settings.pp, "ep": settings.ep}
    for name, size in axes.items():
        if size < 1:
            raise SettingsError(f"{name} is {size}: expected a positive number")
    if settings.nproc % math.prod(axes.values()):
        product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        raise SettingsError(
            f"{settings.nproc} ranks are no multiple of {product}",
            "give a multiple with --nproc, or other --tp, --pp and --ep",
        )


def _check_cut(settings: Settings) -> None:
    """What a model that is itself cut cannot be combined with."""
    if not settings.grid.parallel:
        return
    if settings.engine != "native":
        raise SettingsError(
            f"the DeepSpeed engine is data parallel only here ({settings.grid})",
            "use --engine native, or --tp 1 --pp 1 --ep 1",
        )
    if settings.strategy not in ("ddp", "fsdp2"):
        why = (
            "FSDP 1 flattens what a cut has to be seen in"
            if settings.strategy == "fsdp"
            else "its flat partitions are of whole parameters"
        )
        raise SettingsError(
            f"{settings.strategy} has no {settings.grid}: {why}",
            "use --strategy fsdp2, which shards each cut parameter by itself, or ddp",
        )
    if settings.fsdp_cpu_ram_efficient_loading:
        raise SettingsError(
            "fsdp_cpu_ram_efficient_loading sends whole modules, and the model is cut: "
            f"{settings.grid}",
            "leave it out",
        )
    if settings.pp > 1 and settings.state_dict_type == "full":
        raise SettingsError(
            f"state_dict_type full with pp {settings.pp}: no rank has the layers of all stages",
            "use --state-dict-type sharded",
        )
    if settings.pp_schedule == "1f1b" and settings.accumulation < settings.pp:
        raise SettingsError(
            f"the 1f1b schedule of {settings.pp} stages needs as many micro batches a step, a rank "
            f"has {settings.accumulation}",
            "give more with --accumulation or --global-batch, or use --pp-schedule gpipe",
        )


def _check_strategy(settings: Settings) -> None:
    strategy = settings.strategy
    if settings.engine == "deepspeed" and strategy not in ZERO:
        raise SettingsError(
            f"the DeepSpeed engine has no strategy {strategy}", f"use {', '.join(ZERO)}"
        )
    if settings.reduction == "canonical" and default_reduction(settings) != "canonical":
        cut = f", {settings.grid}" if settings.grid.parallel else ""
        raise SettingsError(
            f"canonical reduction is not offered by {strategy} ({settings.engine} engine{cut})",
            "its gradients are summed inside the framework; use ddp or a ZeRO strategy"
            + (" with --tp 1 --pp 1 --ep 1" if cut else ""),
        )
    if settings.offload_param != "none" and strategy != "zero3":
        raise SettingsError(f"offload_param needs zero3, and the strategy is {strategy}")
    if settings.offload_optimizer != "none" and strategy not in ZERO[1:]:
        raise SettingsError(f"offload_optimizer needs zero1, zero2 or zero3, not {strategy}")
    offloads = (settings.offload_optimizer, settings.offload_param)
    if "nvme" in offloads and not settings.nvme_path:
        raise SettingsError("offload to nvme without a place", "give --nvme-path DIR")
    if settings.state_dict_type == "megatron" and settings.layout == "FSDP":
        _check_megatron(settings)
    if settings.sharded_files == "rank" and settings.state_dict_type != "sharded":
        raise SettingsError("sharded_files is a form of --state-dict-type sharded")


def _check_megatron(settings: Settings) -> None:
    if settings.strategy == "fsdp":
        raise SettingsError(
            "state_dict_type megatron needs parameters as they are, and FSDP 1 flattens them",
            "use --strategy fsdp2, or another --state-dict-type",
        )
    if settings.freeze:
        raise SettingsError(
            "state_dict_type megatron with --freeze: Megatron-LM numbers its optimizer's state by "
            "all parameters",
            "use --state-dict-type sharded",
        )


def _check_files(settings: Settings) -> None:
    if settings.tag and not settings.resume:
        raise SettingsError("--tag without --resume")
