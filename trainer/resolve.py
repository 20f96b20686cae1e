"""The settings of one run: what follows from the number of ranks, and what contradicts itself."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from trainer.errors import SettingsError
from trainer.settings import FSDP, ZERO, Settings, default_reduction


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
    if micro * times * world != whole:
        raise _batch_error(whole, micro, chosen.get("accumulation", 0), settings)
    return {"global_batch": whole, "micro_batch": micro, "accumulation": times}


def _batch_error(whole: int, micro: int, times: int, settings: Settings) -> SettingsError:
    """Return the error of a global batch that the ranks cannot divide, with what they can."""
    world = settings.grid.dp
    noun = f"{'data-parallel ' if settings.grid.parallel else ''}rank"
    ranks = f"{world} {noun}{'s' if world > 1 else ''}"
    unit = micro * world
    if times:
        return SettingsError(
            f"a global batch of {whole} is not {ranks} x micro batch {micro} "
            f"x accumulation {times}",
            f"use --global-batch {unit * times}, or leave out --accumulation",
        )
    below = whole // unit * unit
    ways = "--global-batch " + " or ".join(str(each) for each in (below, below + unit) if each)
    if whole % micro == 0:
        sizes = [each for each in range(1, whole // micro + 1) if whole // micro % each == 0]
        near = sorted(sorted(sizes, key=lambda each: abs(each - world))[:4])
        ways += f", or {', '.join(map(str, near[:-1]))} or {near[-1]} {noun}s" if near[1:] else ""
    return SettingsError(
        f"a global batch of {whole} is not divisible by {ranks} x micro batch {micro}",
        f"use {ways}",
    )


def _defaults(settings: Settings) -> dict[str, Any]:
    """What other choices decide."""
    return {
        "reduction": settings.reduction or default_reduction(settings),
        "schedule_steps": settings.schedule_steps or settings.steps,
    }


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
