"""Classes of DeepSpeed in its checkpoints, written and read without it.

Its files have some objects beside tensors and plain values. A stand-in class here has the name of
the real one: ``Pickler`` writes that name, and `allow_classes` lets torch's weights_only reader
create the stand-in for it. This module acts as the ``pickle_module`` of ``torch.save``.

Classes: deepspeed/runtime/fp16/loss_scaler.py, runtime/zero/config.py, utils/tensor_fragment.py,
0.19.8.
"""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainer.core.scaling import LossScaler


class StandIn:
    """Base of the stand-ins: an object with the given attributes."""

    real: str
    """Module and name of the real class."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        # Python calls it only for names that the file did not set.
        raise AttributeError(f"{self.real} in the checkpoint has no {name}")


class StaticScaler(StandIn):
    """A fixed loss scale: ``cur_scale``, ``dynamic``."""

    real = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


class DynamicScaler(StandIn):
    """A dynamic loss scale; attributes as in `make_scaler_object`."""

    real = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"


class FragmentAddress(StandIn):
    """The location of a parameter's part in a flat tensor: ``numel``, ``start``, in elements."""

    real = "deepspeed.utils.tensor_fragment.fragment_address"


class ZeroStage(StandIn):
    """A ZeRO stage, 0 to 3: an enum member, which pickles as a call of its class."""

    real = "deepspeed.runtime.zero.config.ZeroStageEnum"

    def __init__(self, value: int) -> None:
        super().__init__(value=value)

    def __reduce__(self) -> tuple[type[ZeroStage], tuple[int]]:
        return type(self), (self.value,)


STAND_INS: tuple[type[StandIn], ...] = (
    StaticScaler,
    DynamicScaler,
    FragmentAddress,
    ZeroStage,
)


class Pickler(pickle._Pickler):  # noqa: SLF001  (the C pickler imports what it names)
    """Writes stand-ins under the names of the real classes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write the name of a class or function."""
        if isinstance(obj, type) and obj in STAND_INS:
            module, _, qualname = obj.real.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{qualname}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


def allow_classes() -> AbstractContextManager[None]:
    """Let ``torch.load(weights_only=True)`` create stand-ins for the frameworks' classes."""
    context: AbstractContextManager[None] = torch.serialization.safe_globals(
        [(stand_in, stand_in.real) for stand_in in STAND_INS]
    )
    return context


def make_scaler_object(scaler: LossScaler) -> StandIn:
    """Return the object that DeepSpeed saves for this scaler."""
    if not scaler.dynamic:
        return StaticScaler(cur_scale=scaler.scale, dynamic=False)
    return DynamicScaler(
        cur_scale=scaler.scale,
        dynamic=True,
        cur_iter=scaler.iteration,
        last_overflow_iter=scaler.last_overflow,
        scale_factor=2.0,
        scale_window=scaler.window,
        min_scale=scaler.minimum,
        delayed_shift=scaler.hysteresis,
        cur_hysteresis=scaler.patience,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )


def restore_scaler(scaler: LossScaler, saved: Any) -> None:
    """Copy scale and counts from DeepSpeed's object, unless the settings fix the scale."""
    if scaler.dynamic and isinstance(saved, DynamicScaler):
        scaler.scale = float(saved.cur_scale)
        scaler.iteration = saved.cur_iter
        scaler.last_overflow = saved.last_overflow_iter
        scaler.patience = saved.cur_hysteresis
