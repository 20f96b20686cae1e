"""AdamW and its param groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.core.settings import CoreSettings


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share hyper-parameters, in model order."""

    names: tuple[str, ...]
    weight_decay: float


def list_trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (fqn, parameter) of the trainable parameters, in model order, tied ones once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def make_param_groups(model: nn.Module, settings: CoreSettings) -> list[ParamGroup]:
    """Split trainable parameters into decayed matrices and undecayed biases and norms.

    ``settings.param_groups`` may be "single": then they are one group.
    """
    trainable = list_trainable(model)
    if settings.param_groups == "single":
        return [ParamGroup(tuple(name for name, _ in trainable), settings.weight_decay)]
    matrices = tuple(name for name, p in trainable if p.ndim > 1)
    vectors = tuple(name for name, p in trainable if p.ndim <= 1)
    groups = [ParamGroup(matrices, settings.weight_decay), ParamGroup(vectors, 0.0)]
    return [group for group in groups if group.names]


def make_hyperparameters(settings: CoreSettings, weight_decay: float, lr: float) -> dict[str, Any]:
    """Return all keys of a group of torch.optim.AdamW (2.13) but ``params``, as its files do."""
    return {
        "lr": lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": weight_decay,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }


def apply_adamw(
    master: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    step: Tensor,
    settings: CoreSettings,
    weight_decay: float,
    lr: float,
) -> None:
    """Apply one AdamW update in place to flat float32 tensors, with torch's own arithmetic.

    Args:
        master: the weights.
        gradient: the averaged and clipped gradient.
        moments: exp_avg and exp_avg_sq.
        step: 0-d float32, the number of earlier updates; it is incremented.
        settings: beta1, beta2 and eps.
        weight_decay: that of the param group.
        lr: the learning rate.
    """
    adamw(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],  # used by amsgrad
        [step],
        foreach=False,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=settings.eps,
        maximize=False,
    )
