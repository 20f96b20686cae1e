"""Adam as apex and Transformer Engine lay out its state: ``step`` is kept in the param group.

Their ``FusedAdam`` needs a GPU; users of Megatron have one of them, and its layout is what
checkpoints hold (apex/optimizers/fused_adam.py). The arithmetic is Adam's (AdamW's by default).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Plain PyTorch behind the constructor, groups and state of apex's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,  # core 0.18 and later pass it
    ) -> None:
        assert not capturable
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = self.state[param], param.grad, group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        if self.adam_w_mode:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient.add(param, alpha=group["weight_decay"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        second = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        spread = (square / second).sqrt_().add_(group["eps"])
        param.addcdiv_(mean, spread, value=-group["lr"] / first)


class PrecisionAwareAdam(FusedAdam):
    """Transformer Engine's FusedAdam, as ``--use-precision-aware-optimizer`` configures it.

    It updates fp32 masters of bf16 parameters by itself. With ``store_param_remainders`` it keeps
    only their lower 16 bits: the upper ones are those of the parameter, minus one if the remainder
    is negative (transformer_engine/pytorch/optimizers/fused_adam.py, common/multi_tensor/adam.cu).
    """

    def __init__(
        self,
        params: Any,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        assert master_weights
        assert use_decoupled_grad
        assert master_weight_dtype == torch.float32
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.keeps_remainders = store_param_remainders
        super().__init__(params, **options)

    def initialize_state(self, param: torch.Tensor) -> None:
        """Give a parameter its state."""
        state = self.state[param]
        for slot, dtype in self.dtypes.items():
            state[slot] = torch.zeros_like(param, dtype=dtype)
        if self.keeps_remainders:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        else:
            state["master_param"] = param.detach().clone().float()

    def get_unscaled_state(self, param: torch.Tensor, slot: str) -> torch.Tensor:
        """Return a state in float32, or the remainders as they are."""
        value = self.state[param][slot]
        return value if value.dtype == torch.int16 else value.float()

    def set_scaled_state(self, param: torch.Tensor, slot: str, value: torch.Tensor) -> None:
        """Set a state from float32, or remainders from remainders only."""
        if slot == "padding":
            return  # Megatron-core 0.16.1 passes this mark of dp_reshardable too
        is_remainder = slot == "master_param" and self.keeps_remainders
        assert value.dtype == (torch.int16 if is_remainder else torch.float32)
        if slot not in self.state[param]:
            self.initialize_state(param)
        self.state[param][slot].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states without PyTorch's cast to the dtype of the parameter."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = {}
                for slot, value in state_dict["state"][number].items():
                    self.set_scaled_state(param, slot, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                gradient = getattr(param, "decoupled_grad", None)
                gradient = param.grad if gradient is None else gradient
                if gradient is not None:
                    self._update_master(param, gradient.float(), group)

    def _update_master(
        self, param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        if not self.state[param]:
            self.initialize_state(param)
        state = self.state[param]
        master = torch.nn.Parameter(whole_master(param, state["master_param"]))
        master.grad = gradient
        self.state[master] = {slot: state[slot].float() for slot in self.dtypes}
        self._update(master, group)
        for slot, value in self.state.pop(master).items():
            state[slot].copy_(value)
        if self.keeps_remainders:
            bits = master.detach().view(torch.int32)
            param.view(torch.int16).copy_((bits + 0x8000) >> 16)
            state["master_param"].copy_(bits.to(torch.int16))
        else:
            state["master_param"].copy_(master)
            param.copy_(master)


def whole_master(param: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 parameter, of which only the remainder may be stored."""
    if stored.dtype != torch.int16:
        return stored.detach().clone()
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (upper + stored.to(torch.int32)).view(torch.float32)


@contextmanager
def transformer_engine_stub() -> Iterator[None]:
    """Have Megatron-core's check of the configuration find Transformer Engine's class."""
    from megatron.core.optimizer import optimizer_config

    class FusedAdam(PrecisionAwareAdam):
        def __init__(
            self,
            params: Any,
            *,
            master_weight_dtype: Any = None,
            exp_avg_dtype: Any = None,
            exp_avg_sq_dtype: Any = None,
            use_decoupled_grad: bool = False,
        ) -> None:
            raise NotImplementedError  # only the names of the arguments are read

    modules = {
        name: ModuleType(f"transformer_engine{name}")
        for name in ("", ".pytorch", ".pytorch.optimizers")
    }
    modules[".pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    found = optimizer_config.is_te_min_version
    sys.modules.update({f"transformer_engine{name}": each for name, each in modules.items()})
    optimizer_config.is_te_min_version = lambda *_, **__: True
    try:
        yield
    finally:
        optimizer_config.is_te_min_version = found
        for name in modules:
            del sys.modules[f"transformer_engine{name}"]
