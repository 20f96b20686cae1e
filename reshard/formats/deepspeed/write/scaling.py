"""The loss scaler: DeepSpeed loads it whole, with whatever the file says.

Source: DeepSpeed 0.19.8 ``runtime/fp16/loss_scaler.py``, ``runtime/config.py``
(``get_dynamic_loss_scale_args``), ``runtime/fp16/unfused_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOOSE = ("last_overflow_iter", "scale_factor", "scale_window")  # stage 0 keeps these of a dynamic


def none() -> dict[str, Any]:
    """What stands in the files of runs in bf16 and fp32."""
    return {"cur_scale": 1.0, "dynamic": False}


def fresh(fp16: Mapping[str, Any]) -> dict[str, Any]:
    """The scaler with which a run begins.

    Args:
        fp16: that section of the configuration.
    """
    if fp16.get("loss_scale"):
        return {"cur_scale": fp16["loss_scale"], "dynamic": False}
    shift = fp16.get("hysteresis", 2)
    return {
        "cur_scale": 2 ** fp16.get("initial_scale_power", 16),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": shift,
        "cur_hysteresis": shift,
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
    }


def kept(state: Mapping[str, Any], fp16: Mapping[str, Any]) -> dict[str, Any]:
    """The source's scaler; what stage 0 does not store of it is as at the beginning."""
    if not state.get("dynamic", "scale_window" in state):
        return {"cur_scale": state["cur_scale"], "dynamic": False}
    whole = {**fresh({**fp16, "loss_scale": 0}), **state, "dynamic": True}
    return {key: value for key, value in whole.items() if key not in ("class", "dtype")}


def loose(state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The keys that stage 0 keeps."""
    found = {
        "dynamic_loss_scale": state["dynamic"],
        "cur_scale": state["cur_scale"],
        "cur_iter": state.get("cur_iter", step),
    }
    return found | {key: state[key] for key in _LOOSE if state["dynamic"]}
