"""Third-party optimizers that DeepSpeed can train with.

Each keeps the state that the published one keeps, under its names; what they do with it is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.judges.deepspeed_cases import Case, ds_config

Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """One momentum and no counter (lion-pytorch)."""

    def __init__(self, params: Groups, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for param in _with_gradient(group):
                state = self.state[param]
                state.setdefault("exp_avg", torch.zeros_like(param))
                update = torch.lerp(param.grad, state["exp_avg"], first).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                state["exp_avg"].lerp_(param.grad, 1 - second)


class AdEMAMix(torch.optim.Optimizer):
    """Two momenta; it counts in Python (the authors' own)."""

    def __init__(self, params: Groups, lr: float = 1e-3) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999, 0.9999), "eps": 1e-8, "alpha": 2.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one update."""
        for group in self.param_groups:
            fast, second, slow = group["betas"]
            for param in _with_gradient(group):
                state = self.state[param]
                for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
                state["step"] = int(state.get("step", 0)) + 1
                state["exp_avg_fast"].lerp_(param.grad, 1 - fast)
                state["exp_avg_slow"].lerp_(param.grad, 1 - slow)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                scale = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + group["eps"]
                mean = state["exp_avg_fast"] / (1 - fast ** state["step"])
                update = mean + group["alpha"] * state["exp_avg_slow"]
                param.sub_(group["lr"] * update / scale)


class ScheduleFree(torch.optim.Optimizer):
    """The averaged sequence is the weight, ``z`` a slot; it counts in the group (schedulefree)."""

    def __init__(self, params: Groups, lr: float = 1e-3) -> None:
        adam = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(params, {**adam, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one update."""
        for group in self.param_groups:
            first, second = group["betas"]
            group["lr_max"] = lr = max(group["lr"], group["lr_max"])
            group["weight_sum"] += lr**2
            group["k"] += 1
            share = lr**2 / group["weight_sum"]
            for param in _with_gradient(group):
                state = self.state[param]
                state.setdefault("z", param.clone())
                state.setdefault("exp_avg_sq", torch.zeros_like(param))
                square = state["exp_avg_sq"]
                square.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                scale = (square / (1 - second ** group["k"])).sqrt() + group["eps"]
                update = param.grad / scale
                param.lerp_(state["z"], share).sub_(update * lr * (1 - first * (1 - share)))
                state["z"].sub_(lr * update)


class Shampoo(torch.optim.Optimizer):
    """A matrix for each dim of a parameter, where that is a matrix."""

    def __init__(self, params: Groups, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one update."""
        for group in self.param_groups:
            for param in _with_gradient(group):
                state = self.state[param]
                state.setdefault("momentum_buffer", torch.zeros_like(param))
                update = param.grad
                if param.dim() == 2:
                    for dim, rows in enumerate((param.grad, param.grad.T)):
                        name = f"precond_{dim}"
                        state.setdefault(name, torch.eye(len(rows), dtype=param.dtype) * 1e-2)
                        state[name].add_(rows @ rows.T)
                    left, right = state["precond_0"].trace(), state["precond_1"].trace()
                    update = update / (left * right) ** 0.25
                state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                param.sub_(group["lr"] * state["momentum_buffer"])


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [param for param in group["params"] if param.grad is not None]


OWN = {"lion": Lion, "ademamix": AdEMAMix, "schedule_free": ScheduleFree, "shampoo": Shampoo}
TORCH = {
    "adam": ("Adam", {"lr": 1e-3}),
    "adamw": ("AdamW", {"lr": 1e-3}),
    "amsgrad": ("AdamW", {"lr": 1e-3, "amsgrad": True}),
    "nadam": ("NAdam", {"lr": 1e-3}),
    "radam": ("RAdam", {"lr": 1e-3}),
    "adamax": ("Adamax", {"lr": 1e-3}),
    "adadelta": ("Adadelta", {"lr": 1e-1}),
    "rmsprop": ("RMSprop", {"lr": 1e-4, "momentum": 0.9, "centered": True}),
    "asgd": ("ASGD", {"lr": 1e-2, "t0": 1.0}),
    "rprop": ("Rprop", {"lr": 1e-4}),
    "sgd": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    "plain_sgd": ("SGD", {"lr": 1e-2}),
    "adagrad": ("Adagrad", {"lr": 1e-2}),
    "adafactor": ("Adafactor", {"lr": 1e-2}),
}
HUGGING_FACE = "hf_adafactor"  # keeps the RMS of what it takes for a parameter: a rank's piece
MUON = {
    "type": "Muon",
    "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "torch_adam": True},
}
NAMES = (*TORCH, *OWN, HUGGING_FACE, "muon")
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@dataclass(frozen=True)
class Kind:
    """How a run trains."""

    optimizer: str
    stage: int
    precision: str = "bf16"
    groups: str = "one"
    exclude_frozen: bool = False
    low_masters: bool = False
    zero_init: bool = False
    sub_groups: bool = False

    def case(self) -> Case:
        """Return the case as the other judge of DeepSpeed has it."""
        chosen = MUON if self.optimizer == "muon" else None
        top = {"optimizer": chosen, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
        scatter = {"reduce_scatter": False} if (self.optimizer, self.stage) == ("muon", 3) else {}
        top |= {"bf16": LOW} if self.low_masters else {}
        # DeepSpeed refuses Muon with reduce_scatter at stage 3
        small = {"sub_group_size": 3000} if self.sub_groups else {}
        config = ds_config(self.stage, self.precision, scatter | small, top)
        return Case(
            "optimizer",
            0,
            config,
            model="menagerie_vector",
            groups=self.groups,
            zero_init=self.zero_init,
        )


def made(name: str, groups: Groups) -> torch.optim.Optimizer | None:
    """Return the optimizer that a caller passes to DeepSpeed; None if its config names it."""
    if name == HUGGING_FACE:
        return transformers.Adafactor(groups, lr=1e-3, relative_step=False, beta1=0.9)
    if name in OWN:
        return OWN[name](groups)  # type: ignore[abstract]
    if name in TORCH:
        kind, options = TORCH[name]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **options)
        return optimizer
    return None
