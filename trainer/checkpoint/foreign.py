"""The classes of DeepSpeed and Megatron-LM in their checkpoints, written and read without them.

Their files hold some objects beside tensors and plain values. A stand-in class here carries the
real one's name: ``Pickler`` writes that name, and ``allowed`` lets torch's weights_only reader make
the stand-in of it. This module poses as the ``pickle_module`` of ``torch.save``.

Classes: deepspeed/runtime/fp16/loss_scaler.py, runtime/zero/config.py, utils/tensor_fragment.py,
0.19.8; megatron/core/enums.py, core/transformer/enums.py, core 0.16.
"""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainer.scaling import LossScaler


class StandIn:
    """Base of the stand-ins: an object with the attributes that it is given."""

    real: str
    """Module and name of the class that this one stands for."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        # Only for names that the file did not set.
        raise AttributeError(f"{self.real} in the checkpoint has no {name}")


class StaticScaler(StandIn):
    """A fixed loss scale: ``cur_scale``, ``dynamic``."""

    real = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


class DynamicScaler(StandIn):
    """A dynamic loss scale; attributes as in ``scaler_object``."""

    real = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"


class FragmentAddress(StandIn):
    """Where a parameter's part is in a flat tensor: ``numel``, ``start``, in elements."""

    real = "deepspeed.utils.tensor_fragment.fragment_address"


class Member(StandIn):
    """An enum member, pickled as a call of its class with ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(value=value)

    def __reduce__(self) -> tuple[type[Member], tuple[int]]:
        return type(self), (self.value,)


class ZeroStage(Member):
    """0 to 3."""

    real = "deepspeed.runtime.zero.config.ZeroStageEnum"


class ModelType(Member):
    """1: encoder or decoder."""

    real = "megatron.core.enums.ModelType"


class AttentionBackend(Member):
    """How attention is computed; nothing here asks."""

    real = "megatron.core.transformer.enums.AttnBackend"


STAND_INS: tuple[type[StandIn], ...] = (
    StaticScaler,
    DynamicScaler,
    FragmentAddress,
    ZeroStage,
    ModelType,
    AttentionBackend,
)


class Pickler(pickle._Pickler):  # noqa: SLF001  (the C pickler insists on importing what it names)
    """Writes stand-ins under the names of the real classes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Name a class or function."""
        if isinstance(obj, type) and obj in STAND_INS:
            module, _, qualname = obj.real.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{qualname}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


def allowed() -> AbstractContextManager[None]:
    """Within it, ``torch.load(weights_only=True)`` makes stand-ins of the frameworks' classes."""
    context: AbstractContextManager[None] = torch.serialization.safe_globals(
        [(stand_in, stand_in.real) for stand_in in STAND_INS]
    )
    return context


def scaler_object(scaler: LossScaler) -> StandIn:
    """The object that DeepSpeed keeps for this scaler."""
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
    """Take scale and counts from DeepSpeed's object; a fixed scale stays what the settings say."""
    if scaler.dynamic and isinstance(saved, DynamicScaler):
        scaler.scale = float(saved.cur_scale)
        scaler.iteration = saved.cur_iter
        scaler.last_overflow = saved.last_overflow_iter
        scaler.patience = saved.cur_hysteresis
