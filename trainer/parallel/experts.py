"""Expert parallelism: each rank has some whole experts of every layer.

The ranks of the axis see the same tokens and route them alike. Each runs its own experts on the
tokens that are routed to them, and the sum over the ranks is the output of the layer. (Megatron-LM
and DeepSpeed give the ranks different tokens and exchange them; a rank keeps the same parameters.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainer.errors import SettingsError

STACKS = ("gate_up_proj", "down_proj")
"""(experts, 2 x intermediate, hidden) and (experts, hidden, intermediate), in transformers 5."""


def cut_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the experts of every layer over the ranks of ``mesh``. Collective.

    Raises:
        SettingsError: the model has no experts, or their number does not divide.
    """
    layers = [module for module in model.modules() if _has_stacks(module)]
    if not layers:
        raise SettingsError(
            f"--ep is {mesh.size()}, and {type(model).__name__} has no layers with stacked experts",
            "use --ep 1, or a mixture-of-experts model (tiny-mixtral)",
        )
    for module in layers:
        for name in STACKS:
            stack = module.get_parameter(name)
            if len(stack) % mesh.size():
                raise SettingsError(
                    f"--ep {mesh.size()} does not divide the {len(stack)} experts of a layer",
                    f"use an --ep that divides {len(stack)}",
                )
            shards = distribute_tensor(stack.detach(), mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(shards, requires_grad=stack.requires_grad))
        cast("Any", module).forward = partial(_run_own_experts, module, mesh)


def _has_stacks(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return all(name in own and own[name].ndim == 3 for name in STACKS)


def _run_own_experts(
    experts: Any, mesh: DeviceMesh, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Return the sum over all experts of weight x expert(hidden).

    Args:
        experts: the layer, with this rank's experts.
        mesh: the expert axis.
        hidden: (tokens, hidden).
        chosen: (tokens, k), numbers of experts.
        weights: (tokens, k).
    """
    hidden, weights = _sum_gradient(hidden, mesh), _sum_gradient(weights, mesh)
    up, down = (getattr(experts, name).to_local() for name in STACKS)
    total = torch.zeros_like(hidden)
    for number in range(len(up)):
        # An expert without tokens runs too: ranks that share a parameter must all have a gradient.
        is_chosen = chosen == mesh.get_local_rank() * len(up) + number
        which, token = torch.where(is_chosen.t())
        gate, value = nn.functional.linear(hidden[token], up[number]).chunk(2, -1)
        output = nn.functional.linear(experts.act_fn(gate) * value, down[number])
        output = output * weights[token, which, None]
        total.index_add_(0, token, output.to(total.dtype))
    parts = DTensor.from_local(total, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same tensor; its gradient is summed over the ranks of ``mesh``."""
    same = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])
