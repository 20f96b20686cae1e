"""Build the objects that DeepSpeed pickles by class, the loss scaler, and step counters.

Source: DeepSpeed 0.19.8 ``runtime/fp16/loss_scaler.py``, ``runtime/config.py``
(``get_dynamic_loss_scale_args``), ``runtime/fp16/unfused_optimizer.py``,
``runtime/zero/config.py``, ``utils/tensor_fragment.py``. DeepSpeed loads a loss scaler whole, with
whatever the file holds.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_writer import StorageView, build_number
from reshard.errors import UsageError, shown
from reshard.training import optimizers

WRITTEN_AS = "0.19.8"  # the DeepSpeed version whose layout is written
UNIVERSAL_VERSION = 0.4  # of its universal_checkpoint_info (``checkpoint/constants.py``)
UNSCALED = {"cur_scale": 1.0, "dynamic": False}  # the loss scaler of runs in bf16 and fp32

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")  # of a scaler at stage 0


def make_stage_enum(stage: int) -> Call:
    """Return a member of ``ZeroStageEnum``."""
    return Call("deepspeed.runtime.zero.config.ZeroStageEnum", (stage,))


def make_fragment_address(start: int, numel: int) -> Call:
    """Return the position of a parameter's fragment in a rank's flat piece."""
    name = "deepspeed.utils.tensor_fragment.fragment_address"
    return Call(name, (), {"numel": numel, "start": start})


def make_step_state(
    count: float | None, hyper: Mapping[str, Any], slots: Collection[str]
) -> dict[str, Any]:
    """Return the part of an optimizer's state that has the step counter; empty without a count."""
    return {} if count is None else {"step": make_step_counter(count, hyper, slots)}


def make_step_counter(
    count: float, hyper: Mapping[str, Any], slots: Collection[str]
) -> StorageView | int:
    """Return a step counter as the group's optimizer keeps it.

    torch's optimizers count in a 0-d tensor. DeepSpeed's own (FusedAdam, CPUAdam), known by their
    hyper-parameters, and bitsandbytes', known by their slots, count in an integer.
    """
    is_integer = is_deepspeed_optimizer(hyper) or optimizers.is_of_bitsandbytes(slots)
    return int(count) if is_integer else build_number(count)


def is_deepspeed_optimizer(hyper: Mapping[str, Any]) -> bool:
    """Return whether a param group belongs to an optimizer that DeepSpeed itself implements."""
    return "bias_correction" in hyper and "capturable" not in hyper


def make_initial_scaler(fp16: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loss scaler with which a run begins.

    Args:
        fp16: the section ``fp16`` of the configuration.

    Raises:
        UsageError: ``initial_scale_power`` is not the exponent of a float.
    """
    if fp16.get("loss_scale"):
        return {"cur_scale": fp16["loss_scale"], "dynamic": False}
    shift, power = fp16.get("hysteresis", 2), fp16.get("initial_scale_power", 16)
    if type(power) is not int or not 0 <= power < sys.float_info.max_exp:
        raise UsageError(
            "initial_scale_power",
            f"is {shown(power)} in the DeepSpeed configuration, expected a number from 0 to"
            f" {sys.float_info.max_exp - 1}",
        )
    return {
        "cur_scale": 2**power,
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": shift,
        "cur_hysteresis": shift,
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,  # no key of the configuration changes it
    }


def complete_scaler(state: Mapping[str, Any], fp16: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source's scaler, with initial values for what stage 0 does not store."""
    if not state.get("dynamic", "scale_window" in state):
        return {"cur_scale": state["cur_scale"], "dynamic": False}
    # A loss_scale of 0 selects the initial values of a dynamic scaler.
    whole = {**make_initial_scaler({**fp16, "loss_scale": 0}), **state, "dynamic": True}
    return {key: value for key, value in whole.items() if key not in ("class", "dtype")}


def make_scaler_object(state: Mapping[str, Any]) -> Call:
    """Return a loss scaler; a dynamic one names the dtype that it scales for."""
    if not state["dynamic"]:
        return Call(f"{_SCALERS}.LossScaler", (), dict(state))
    return Call(f"{_SCALERS}.DynamicLossScaler", (), {**state, "dtype": Global("torch.float16")})


def make_scaler_keys(state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the keys of a loss scaler that stage 0 stores."""
    keys = {
        "dynamic_loss_scale": state["dynamic"],
        "cur_scale": state["cur_scale"],
        "cur_iter": state.get("cur_iter", step),
    }
    return keys | {key: state[key] for key in _DYNAMIC_KEYS if state["dynamic"]}
