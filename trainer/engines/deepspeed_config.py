"""The settings as a ds_config for the real DeepSpeed: the inverse of ``config/deepspeed.py``."""

from __future__ import annotations

from typing import Any

from trainer.checkpoint.deepspeed import make_basic_config
from trainer.settings import Settings


def make_ds_config(settings: Settings, largest: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of the run.

    Args:
        settings: the settings of the run.
        largest: number of elements of the largest parameter.
    """
    config: dict[str, Any] = {
        **make_basic_config(settings),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.lr,
                "betas": [settings.beta1, settings.beta2],
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
                "torch_adam": True,
            },
        },
        "zero_optimization": _make_zero_section(settings, largest),
    }
    if settings.schedule != "constant":
        config["scheduler"] = {"type": settings.schedule, "params": _make_schedule_params(settings)}
    # DeepSpeed's default for grad_accum_dtype is the precision.
    if settings.precision not in {"fp32", settings.grad_dtype}:
        config["data_types"] = {"grad_accum_dtype": settings.grad_dtype}
    if settings.precision == "fp16":
        config["fp16"] |= {
            "loss_scale": settings.loss_scale,
            "initial_scale_power": settings.initial_scale_power,
            "loss_scale_window": settings.loss_scale_window,
            "hysteresis": settings.hysteresis,
            "min_loss_scale": settings.min_loss_scale,
        }
    return config


def _make_zero_section(settings: Settings, largest: int) -> dict[str, Any]:
    stage = settings.zero_stage
    section: dict[str, Any] = {"stage": stage}
    if stage:
        section["reduce_bucket_size"] = settings.reduce_bucket_size
    if stage == 3:
        section["sub_group_size"] = settings.sub_group_size
        section["stage3_param_persistence_threshold"] = settings.persistence_threshold
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(settings, name)
        if device != "none":
            section[name] = {"device": device}
        if device == "nvme":
            section[name]["nvme_path"] = settings.nvme_path
    if settings.offload_param == "nvme":
        section["offload_param"]["buffer_size"] = largest
    return section


def _make_schedule_params(settings: Settings) -> dict[str, Any]:
    params: dict[str, Any] = {
        "warmup_num_steps": settings.warmup_steps,
        "warmup_type": settings.warmup_type,
    }
    if settings.schedule != "WarmupLR":
        params["total_num_steps"] = settings.schedule_steps
    if settings.schedule == "WarmupCosineLR":
        params["warmup_min_ratio"] = settings.warmup_min_ratio
        params["cos_min_ratio"] = settings.cos_min_ratio
    else:
        params["warmup_min_lr"] = settings.warmup_min_lr
        params["warmup_max_lr"] = settings.lr
    return params
