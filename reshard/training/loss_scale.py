"""Convert the dynamic loss scaler between torch's ``GradScaler`` and DeepSpeed's.

Both raise the scale after a window of good steps and lower it at an overflow. torch counts the good
steps; DeepSpeed counts all steps and remembers the last that overflowed, and waits one step longer.
The next raise falls on the same step in both forms. DeepSpeed's hysteresis has no place in torch.

Sources: torch 2.13 ``amp/grad_scaler.py`` (``state_dict``; ``_amp_update_scale_`` raises where the
count reaches the interval); DeepSpeed 0.19.8 ``runtime/fp16/loss_scaler.py``
(``DynamicLossScaler.update_scale``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_DEEPSPEED = ("cur_scale", "scale_factor", "scale_window", "cur_iter", "last_overflow_iter")


def is_idle(state: Any) -> bool:
    """Return whether the scaler does nothing: DeepSpeed stores a scale of 1 if it is unused."""
    return not state or (isinstance(state, Mapping) and state.get("cur_scale") == 1.0)


def convert_to_torch(state: Any) -> dict[str, Any] | None:
    """Return the state for ``GradScaler.load_state_dict``; None if the scaler has no such form.

    >>> convert_to_torch({"cur_scale": 8.0, "cur_iter": 7, "last_overflow_iter": 1,
    ...           "scale_factor": 2.0, "scale_window": 1000})["_growth_tracker"]
    4
    """
    if not isinstance(state, Mapping):
        return None
    if all(key in state for key in _TORCH):
        return {key: state[key] for key in _TORCH}
    if not all(key in state for key in _DEEPSPEED) or state.get("dynamic") is False:
        return None
    scale, factor, window, steps, overflowed = (state[key] for key in _DEEPSPEED)
    good = steps - 1 - overflowed
    # After an overflow DeepSpeed counts one step more before a raise: -1 stands for that step.
    tracker = (good - 1) % window if good else -1
    return dict(zip(_TORCH, (scale, factor, 1 / factor, window, tracker), strict=True))


def convert_to_deepspeed(state: Any, steps: int) -> dict[str, Any] | None:
    """Return a DeepSpeed scaler's state without its settings; None if there is no such form.

    Args:
        steps: number of steps of the run, including those that overflowed.

    DeepSpeed raises and lowers by one factor, so a ``GradScaler`` with two different ones has no
    such form.

    >>> scaler = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5,
    ...           "growth_interval": 1000, "_growth_tracker": 4}
    >>> convert_to_deepspeed(scaler, 7)["last_overflow_iter"]
    1
    """
    if not isinstance(state, Mapping):
        return None
    if "cur_scale" in state:
        return dict(state)
    if not all(key in state for key in _TORCH):
        return None
    scale, growth, backoff, window, tracker = (state[key] for key in _TORCH)
    if growth * backoff != 1:
        return None
    values = (scale, growth, window, steps, steps - 2 - tracker)
    return {**dict(zip(_DEEPSPEED, values, strict=True)), "dynamic": True}
