"""Fully sharded data parallelism in PyTorch: what both of its generations share.

The same idea as ZeRO stage 3, done inside torch. Parameters, gradients and moments are fp32 shards;
FSDP casts what it gathers. The generations differ in what a shard is::

    FSDP 1 (fsdp1.py)                   FSDP 2 (fsdp2.py)
    unit = one flat parameter           unit = a list of DTensors
    |aaaaaaaaa|bbb|ccccccc|.|           |aaaaaaaaa|  |bbb|  |ccccccc|
    | rank 0    | rank 1    |           | 0  | 1  |  |0|1|  | 0 | 1 |    each cut into rows

A generation decides how the model is wrapped (``_wrap``), which tensors the optimizer updates
(``_select_parameters``), and how full parameters are gathered from shards (``parameters``).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainer.core.engine import Engine
from trainer.core.fsdp_reduce import UnitSums, order_additions
from trainer.core.fsdp_units import choose_units, ignore_known_warnings, list_mesh_axes
from trainer.core.model import build_model
from trainer.core.norm import compute_norm
from trainer.core.optimizer import (
    list_trainable,
    make_hyperparameters,
    make_param_groups,
)
from trainer.core.ranks import Ranks
from trainer.core.settings import CoreSettings


class FsdpEngine(Engine):
    """A model that FSDP shards, and an AdamW over the shards."""

    def __init__(self, settings: CoreSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        axes = list_mesh_axes(settings, ranks.world)
        self.mesh = init_device_mesh(
            ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        model = build_model(settings)
        _broadcast_weights(model, ranks)
        # Shapes and frozen parameters must be read before parameters become shards of their unit.
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.groups = make_param_groups(model, settings)
        self._numel = sum(p.numel() for _, p in list_trainable(model))
        with ignore_known_warnings():
            self.units = choose_units(model, settings)
            self.model = self._wrap(model)
        self.optimizer = self._make_optimizer()
        self._sums: UnitSums | None = None
        if settings.reduction == "canonical":
            self._sums = UnitSums(lambda: self.active_ranks)
            order_additions(self.model, self._sums, ranks.world)

    # What a generation decides

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model; refuse settings that this generation cannot follow."""

    @abstractmethod
    def _select_parameters(self) -> list[list[nn.Parameter]]:
        """Return what the optimizer updates, for each of ``groups``."""

    # The step

    def _end_microbatch(self, *, last: bool) -> None:
        """Leave the sums to FSDP, which has reduced the micro batch during its backward pass.

        To reduce only once, after the last micro batch (``no_sync``), would save communication. But
        then every rank would keep whole gradients, which sharding is there to avoid.
        """
        if self._sums:
            self._sums.end_microbatch()
            if not last:
                self.optimizer.zero_grad()  # the next gradient is the sum up to there

    @property
    def _summed_microbatches(self) -> int:
        if self._sums:
            return self.settings.microbatches
        return self.settings.accumulation  # FSDP has divided by the number of ranks

    def _collect_gradients(self) -> list[Tensor]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        shards = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return [shard.view(-1) for shard in shards]

    def _compute_norm(self, gradients: list[Tensor]) -> float:
        """Return the global norm; of several replicas, only the first one counts."""
        if self.settings.fsdp_sharding_strategy == "NO_SHARD":
            return compute_norm(gradients, self._numel, reduce_on=None)
        in_first_replica = self.ranks.rank < self.mesh.size(self.mesh.ndim - 1)  # axis "shard"
        pieces = [gradient.to(self.ranks.device) for gradient in gradients if in_first_replica]
        return compute_norm(pieces, self._numel, reduce_on=self.ranks.device)

    def _update_weights(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        for gradient in gradients:
            gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad()
        if self._sums:
            self._sums.clear()

    # The optimizer

    def _make_optimizer(self) -> torch.optim.AdamW:
        settings = self.settings
        parameters = self._select_parameters()
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": params,
                    **make_hyperparameters(settings, group.weight_decay, settings.lr),
                }
                for group, params in zip(self.groups, parameters, strict=True)
            ]
        )
        # The moments exist from the start, so that a checkpoint can be read into them, and one
        # that is written before the first update is right. (By default torch makes them with a
        # step of zero gradients, and counts that step.)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.numel():  # FSDP 1: this rank may have no piece of it
                    optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return optimizer


def _broadcast_weights(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the weights and buffers of rank 0, as FSDP's ``sync_module_states``."""
    for tensor in (*model.parameters(), *model.buffers()):
        on_device = tensor.detach().to(ranks.device)
        dist.broadcast(on_device, src=0)
        tensor.detach().copy_(on_device)
