"""Adam as apex and Transformer Engine lay out its state: ``step`` is kept in the param group.

Their ``FusedAdam`` needs a GPU; users of Megatron have one of them, and its layout is what
checkpoints hold (apex/optimizers/fused_adam.py). The arithmetic is Adam's (AdamW's by default).
"""

from __future__ import annotations

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
    ) -> None:
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
