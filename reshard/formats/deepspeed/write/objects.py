"""What DeepSpeed pickles by the name of its class, and the tensors that are known beforehand.

Source: DeepSpeed 0.19.8 ``runtime/fp16/loss_scaler.py``, ``runtime/zero/config.py``,
``utils/tensor_fragment.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.box import Index
from reshard.containers.torch_writer import Slot, build_number
from reshard.pickles.values import Call, Global

WRITTEN_AS = "0.19.8"  # the DeepSpeed version whose layout is written
UNIVERSAL_VERSION = 0.4  # of its universal_checkpoint_info (``checkpoint/constants.py``)

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def size(shape: Index) -> Call:
    """A ``torch.Size``."""
    return Call("torch.Size", (shape,))


def stage_enum(stage: int) -> Call:
    """A member of ``ZeroStageEnum``."""
    return Call("deepspeed.runtime.zero.config.ZeroStageEnum", (stage,))


def address(numel: int, start: int) -> Call:
    """Where a parameter's fragment stands in a rank's flat piece."""
    name = "deepspeed.utils.tensor_fragment.fragment_address"
    return Call(name, (), {"numel": numel, "start": start})


def scaler(state: Mapping[str, Any]) -> Call:
    """A loss scaler; a dynamic one names the dtype that it scales for."""
    if not state["dynamic"]:
        return Call(f"{_SCALERS}.LossScaler", (), dict(state))
    return Call(f"{_SCALERS}.DynamicLossScaler", (), {**state, "dtype": Global("torch.float16")})


def step(count: float, hyper: Mapping[str, Any]) -> Slot | int:
    """A step counter as the group's optimizer keeps it.

    torch's optimizers count in a 0-d tensor. DeepSpeed's own (FusedAdam, CPUAdam), known by their
    hyper-parameters, count in an integer.
    """
    if deepspeeds_own(hyper):
        return int(count)
    return build_number(count)


def deepspeeds_own(hyper: Mapping[str, Any]) -> bool:
    """Whether a param group is of an optimizer of DeepSpeed's own."""
    return "bias_correction" in hyper and "capturable" not in hyper
