"""The settings of one run: derive what depends on the number of ranks; refuse contradictions."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from trainer.core.errors import SettingsError
from trainer.core.settings import ZERO
from trainer.settings import AUTO, Settings, get_default_reduction, supports_canonical


def resolve(chosen: dict[str, Any], nproc: int) -> Settings:
    """Return the settings of a run of ``nproc`` ranks; what was not chosen has its default.

    Raises:
        SettingsError: choices contradict each other.
    """
    if nproc < 1:
        raise SettingsError(f"nproc is {nproc}: expected a positive number", "use a larger --nproc")
    settings = Settings(**{**chosen, "nproc": nproc})
    derived: dict[str, Any] = {
        **_derive_batches(settings, chosen),
        "reduction": settings.reduction or get_default_reduction(settings),
        "schedule_steps": settings.schedule_steps or settings.steps,
    }
    settings = dataclasses.replace(settings, **derived)
    for check in (_check_numbers, _check_strategy, _check_files):
        check(settings)
    return settings


def _derive_batches(settings: Settings, chosen: dict[str, Any]) -> dict[str, int]:
    """Return the three batch sizes; what is not given is derived, the micro batch last.

    Its default is one sample: a micro batch that depended on the number of ranks would change the
    order of additions, and so the bits of the results.
    """
    world = settings.nproc
    whole, micro, times = (
        chosen.get(name, 0) for name in ("global_batch", "micro_batch", "accumulation")
    )
    for name in ("global_batch", "micro_batch", "accumulation"):
        if chosen.get(name, 0) < 0:
            raise SettingsError(
                f"{name} is {chosen[name]}: expected a positive number",
                f"use a larger --{name.replace('_', '-')}, or leave it out",
            )
    if whole and times and not micro:
        micro = whole // (times * world)
    micro = micro or Settings.micro_batch
    times = times or (math.ceil(whole / (micro * world)) if whole else 1)
    whole = whole or micro * times * world
    if micro * times * world != whole and not _can_be_uneven(settings, chosen, whole % micro):
        raise _make_batch_error(whole, micro, chosen.get("accumulation", 0), settings)
    return {"global_batch": whole, "micro_batch": micro, "accumulation": times}


def _can_be_uneven(settings: Settings, chosen: dict[str, Any], rest: int) -> bool:
    """Return whether some ranks may have one micro batch less than the others.

    Only sums in micro batch order can leave out what the other ranks do not have.

    Args:
        rest: samples of the global batch that do not fill a micro batch.
    """
    is_canonical = (settings.reduction or get_default_reduction(settings)) == "canonical"
    return is_canonical and not rest and not chosen.get("accumulation")


def _make_batch_error(whole: int, micro: int, times: int, settings: Settings) -> SettingsError:
    world = settings.nproc
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    unit = micro * world
    if times:
        return SettingsError(
            f"a global batch of {whole} is not {ranks} x micro batch {micro} "
            f"x accumulation {times}",
            f"use --global-batch {unit * times}, or leave out --accumulation",
        )
    below = whole // unit * unit
    ways = "--global-batch " + " or ".join(str(each) for each in (below, below + unit) if each)
    ways += (
        ", or --reduction canonical" if supports_canonical(settings) and not whole % micro else ""
    )
    return SettingsError(
        f"a global batch of {whole} is not divisible by {ranks} x micro batch {micro}",
        f"use {ways}",
    )


# Lowest and highest value of each number; others are refused.
_BOUNDS = {
    **dict.fromkeys(
        "steps nproc seq_len threads timeout reduce_bucket_size sub_group_size loss_scale_window "
        "hysteresis".split(),
        (1, 10**12),
    ),
    **dict.fromkeys(
        "save_every keep warmup_steps schedule_steps fsdp_hybrid_size fsdp_min_num_params".split(),
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
            highest = "less than 1" if high == math.nextafter(1, 0) else f"{high:.15g}"
            raise SettingsError(
                f"{name} is {value}: expected {low} to {highest}",
                f"change --{name.replace('_', '-')}",
            )
    for pattern in settings.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(
                f"--freeze {pattern!r} is not a regular expression: {error}",
                "escape special characters with a backslash",
            ) from error
    if settings.seq_len < 2:
        raise SettingsError(
            "seq_len is 1, and the model predicts the next token of a sample",
            "use --seq-len 2 or more",
        )
    if settings.grad_dtype not in {"fp32", settings.precision}:
        raise SettingsError(
            f"grad_dtype is {settings.grad_dtype} in a {settings.precision} run",
            "use --grad-dtype " + " or ".join(dict.fromkeys(("fp32", settings.precision))),
        )


def _check_strategy(settings: Settings) -> None:
    strategy = settings.strategy
    if settings.reduction == "canonical" and not supports_canonical(settings):
        raise SettingsError(
            f"--reduction canonical is not supported by {strategy} with "
            f"{settings.fsdp_sharding_strategy}, whose gradients are summed inside torch",
            "use --reduction fast, or FULL_SHARD, ddp or ZeRO",
        )
    if settings.offload_param != "none" and strategy != "zero3":
        raise SettingsError(
            f"offload_param is {settings.offload_param}, which needs zero3, and the strategy is "
            f"{strategy}",
            "use --strategy zero3, or --offload-param none",
        )
    if settings.offload_optimizer != "none" and strategy not in ZERO[1:]:
        raise SettingsError(
            f"offload_optimizer is {settings.offload_optimizer}, which needs zero1, zero2 or "
            f"zero3, and the strategy is {strategy}",
            "use --strategy zero2, or --offload-optimizer none",
        )


def _check_files(settings: Settings) -> None:
    if settings.resume == AUTO and not settings.save:
        raise SettingsError(
            "--resume auto continues the run in the directory that --save names, and there is none",
            "add --save DIRECTORY",
        )
    if settings.tag and not settings.resume:
        raise SettingsError(
            f"--tag {settings.tag} names a checkpoint of the run directory that --resume gives, "
            "and there is no --resume",
            "add --resume DIRECTORY, or leave out --tag",
        )
