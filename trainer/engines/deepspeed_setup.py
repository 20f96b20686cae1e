"""DeepSpeed made ready: the settings that it cannot keep, its import, its way to write files."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import files
from trainer.errors import SettingsError, first_line
from trainer.ranks import Ranks
from trainer.settings import Settings


def check(settings: Settings) -> None:
    """Refuse what DeepSpeed would not do as the settings say it.

    Raises:
        SettingsError: naming the setting, and another that does it.
    """
    if settings.on_nan == "skip":
        raise SettingsError(
            "on_nan skip with the DeepSpeed engine: DeepSpeed cannot forget a backward pass",
            "use --on-nan stop, or --engine native",
        )
    if settings.resume and settings.offload_optimizer == "nvme":
        raise SettingsError(
            "DeepSpeed does not restore an optimizer that is offloaded to nvme",
            "resume with --offload-optimizer cpu, or with --engine native",
        )
    if settings.zero_stage == 0 and settings.grad_dtype != settings.precision:
        raise SettingsError(
            f"DeepSpeed's stage 0 adds {settings.precision} gradients up in {settings.precision}, "
            f"and grad_dtype is {settings.grad_dtype}",
            f"give --grad-dtype {settings.precision}, or another --strategy",
        )


def check_disk_operation() -> None:
    """DeepSpeed compiles its disk operation at first use.

    Raises:
        SettingsError: it is not there and cannot be compiled.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise RuntimeError("libaio is not installed")  # noqa: TRY301
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # a compiler's failure has no type of its own
        reason = first_line(error)
        raise SettingsError(
            f"offload to nvme needs DeepSpeed's aio operation: {reason}",
            "install libaio (libaio-dev), ninja and a C++ compiler, or offload to cpu",
        ) from error


def imported(ranks: Ranks) -> Any:
    """DeepSpeed, quiet, on the device that the ranks use.

    Raises:
        SettingsError: it is not installed.
    """
    on_cpu = ranks.device.type == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # without a launcher
    try:
        import deepspeed
        import torch._dynamo  # noqa: F401  (later, stage 3's patches of torch.nn break it)
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise SettingsError(
            f"--engine deepspeed needs DeepSpeed, which cannot be imported: {error}",
            "pip install deepspeed",
        ) from error
    # Warnings are about rates before the first step and overflows, which the log tells.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if on_cpu:
        # It asks before it trains in fp16, and CPUs usually deny; torch computes it all the same.
        type(get_accelerator()).is_fp16_supported = lambda _: True
        # Collectives in shared memory would be compiled now, and spin.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def leave_out(path: str) -> None:
    """Instead of copying zero_to_fp32.py, which ``python -m deepspeed.utils.zero_to_fp32`` runs."""


def checkpoint_files() -> Any:
    """DeepSpeed's way to write and read files: flushed, and without running what they contain."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.fp16.loss_scaler import LossScaler as StaticLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        DynamicLossScaler,
        StaticLossScaler,
        ZeroStageEnum,
        fragment_address,
    ]

    class Files(TorchCheckpointEngine):  # type: ignore[misc]
        problem: Exception | None = None
        """What went wrong in a save. Raised only when all ranks are through with it."""

        def save(self, state_dict: Any, path: str) -> None:
            try:
                files.save(state_dict, Path(path))
            except (OSError, RuntimeError) as error:
                self.problem = error

        def load(self, path: str, map_location: Any = None) -> Any:
            try:
                with torch.serialization.safe_globals(classes):
                    return torch.load(path, map_location=map_location, weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
                raise files.unreadable(path, error) from error

    return Files()
