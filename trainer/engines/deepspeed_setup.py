"""Prepare DeepSpeed: refuse settings that it cannot follow, import it, build its disk operation."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from trainer.core.ranks import Ranks
from trainer.errors import SettingsError, get_first_line
from trainer.settings import Settings


def check_settings(settings: Settings) -> None:
    """Refuse settings that DeepSpeed would not follow.

    Raises:
        SettingsError: it names the setting, and another one that works.
    """
    if settings.on_nan == "skip":
        raise SettingsError(
            "--on-nan skip does not work with DeepSpeed, which cannot discard a backward pass",
            "use --on-nan stop, or --engine native",
        )
    if settings.resume and settings.offload_optimizer == "nvme":
        raise SettingsError(
            "DeepSpeed does not restore an optimizer that is offloaded to nvme",
            "resume with --offload-optimizer cpu, or with --engine native",
        )
    if settings.zero_stage == 0 and settings.grad_dtype != settings.precision:
        raise SettingsError(
            f"stage 0 of DeepSpeed adds {settings.precision} gradients in {settings.precision}, "
            f"and --grad-dtype is {settings.grad_dtype}",
            f"use --grad-dtype {settings.precision}, or another --strategy",
        )


def build_disk_operation() -> None:
    """Compile DeepSpeed's disk operation now, which it would do at first use.

    Raises:
        SettingsError: it cannot be compiled.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise RuntimeError("libaio is not installed")  # noqa: TRY301
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # a compiler's failure has no type of its own
        reason = get_first_line(error)
        raise SettingsError(
            f"offload to nvme needs DeepSpeed's aio operation: {reason}",
            "install libaio (libaio-dev), ninja and a C++ compiler, or offload to cpu",
        ) from error


def import_deepspeed(ranks: Ranks) -> Any:
    """Return the module ``deepspeed``, without its log, on the device that the ranks use.

    Raises:
        SettingsError: it is not installed.
    """
    on_cpu = ranks.device.type == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # without a launcher
    try:
        import deepspeed
        import torch._dynamo  # noqa: F401  (its import fails after stage 3 patches torch.nn)
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise SettingsError(
            f"--engine deepspeed needs DeepSpeed, which cannot be imported: {error}",
            "pip install deepspeed, or use --engine native",
        ) from error
    # Its warnings are about rates before the first step and overflows, which our log shows.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if on_cpu:
        # It refuses fp16 on most CPUs, and torch computes it there all the same.
        type(get_accelerator()).is_fp16_supported = lambda _: True
        # Its collectives in shared memory would be compiled now, and would busy-wait.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
