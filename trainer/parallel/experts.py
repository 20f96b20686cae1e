"""Expert parallel: each rank has some experts of every layer, whole, and adds up what they say.

The ranks of the axis see the same tokens and route them alike; each runs its own experts on the
tokens that are theirs, and the sum of all ranks is the layer's output. (Megatron-LM and DeepSpeed
give the ranks different tokens and exchange them; what a rank keeps is the same.)
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


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of ``mesh`` its experts of every layer. Collective.

    Raises:
        SettingsError: the model has no experts, or their number does not divide.
    """
    found = [module for module in model.modules() if _has_stacks(module)]
    if not found:
        raise SettingsError(
            f"ep {mesh.size()}, and {type(model).__name__} has no layers with stacked experts",
            "use --ep 1, or a model of experts (tiny-mixtral)",
        )
    for module in found:
        for name in STACKS:
            stack = module.get_parameter(name)
            if len(stack) % mesh.size():
                raise SettingsError(
                    f"ep {mesh.size()} does not divide {len(stack)} experts",
                    f"use an --ep that divides {len(stack)}",
                )
            shards = distribute_tensor(stack.detach(), mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(shards, requires_grad=stack.requires_grad))
        cast("Any", module).forward = partial(_forward, module, mesh)


def _has_stacks(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return all(name in own and own[name].ndim == 3 for name in STACKS)


def _forward(
    experts: Any, mesh: DeviceMesh, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The sum over all experts of weight x expert(hidden).

    Args:
        hidden: (tokens, hidden).
        chosen: (tokens, k), numbers of experts.
        weights: (tokens, k).
    """
    hidden, weights = _entering(hidden, mesh), _entering(weights, mesh)
    up, down = (getattr(experts, name).to_local() for name in STACKS)
    total = torch.zeros_like(hidden)
    for number in range(len(up)):
        # All of them, also for no tokens: ranks that share a parameter must all have a gradient.
        mine = chosen == mesh.get_local_rank() * len(up) + number
        which, token = torch.where(mine.t())
        gate, value = nn.functional.linear(hidden[token], up[number]).chunk(2, -1)
        said = nn.functional.linear(experts.act_fn(gate) * value, down[number])
        said = said * weights[token, which, None]
        total.index_add_(0, token, said.to(total.dtype))
    parts = DTensor.from_local(total, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _entering(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor, whose gradient is the sum of what the ranks' experts have to say of it."""
    same = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])
