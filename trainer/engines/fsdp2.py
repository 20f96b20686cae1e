"""fully_shard: each parameter is a DTensor of its own, cut into rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from trainer.engines.first_weights import FirstWeights
from trainer.engines.sharded import ShardedEngine
from trainer.errors import SettingsError
from trainer.optimizer import ParamGroup
from trainer.tensors import DTYPES


class Fsdp2Engine(ShardedEngine):
    """FSDP 2."""

    def _check(self, model: nn.Module) -> None:
        del model
        settings = self.settings
        unable = {
            "fsdp_sharding_strategy NO_SHARD": settings.fsdp_sharding_strategy == "NO_SHARD",
            "fsdp_use_orig_params false": not settings.fsdp_use_orig_params,
            "fsdp_limit_all_gathers false": not settings.fsdp_limit_all_gathers,
            "fsdp_backward_prefetch BACKWARD_POST": (
                settings.fsdp_backward_prefetch == "BACKWARD_POST"
            ),
        }
        for choice, chosen in unable.items():
            if chosen:
                raise SettingsError(
                    f"FSDP 2 has no {choice}", "leave it out, or use --strategy fsdp"
                )

    def _wrap(self, weights: FirstWeights) -> nn.Module:
        model = weights.model
        for unit in reversed(self.units.values()):  # inner units first
            self._fully_shard(unit, weights)
        self._fully_shard(model, weights)
        self._prefetch(model)
        return model

    def _fully_shard(self, unit: nn.Module, weights: FirstWeights) -> None:
        settings = self.settings
        weights.fill_all(unit)
        after_forward = settings.fsdp_sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
        pinned = self.ranks.device.type == "cuda"
        offload = settings.fsdp_offload_params
        fully_shard(
            unit,
            mesh=self.mesh,
            # None: yes, but for the root, whose parameters the backward pass needs at once.
            reshard_after_forward=None if after_forward else False,
            mp_policy=self._mixed_precision(),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        )

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        if self.settings.precision == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[self.settings.precision],
            reduce_dtype=DTYPES[self.settings.grad_dtype],
        )

    def _prefetch(self, model: nn.Module) -> None:
        """FSDP 2 gathers ahead in the backward pass, and not in the forward pass, by itself."""
        order = [unit for unit in (model, *self.units.values()) if isinstance(unit, FSDPModule)]
        if self.settings.fsdp_forward_prefetch:
            for unit, following in pairwise(order):
                unit.set_modules_to_forward_prefetch([following])
        if self.settings.fsdp_backward_prefetch == "NO_PREFETCH":
            for unit in order:  # a list of its own replaces the default; the unit is there already
                unit.set_modules_to_backward_prefetch([unit])

    def _params(self, groups: list[ParamGroup]) -> list[list[nn.Parameter]]:
        live = dict(self.model.named_parameters())
        return [[live[name] for name in group.names] for group in groups]

    def _shard(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _live(self) -> Iterator[Tensor]:
        return (self._shard(parameter).detach() for parameter in self.model.parameters())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See Engine: gathered one by one."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                shards = parameter.detach().to(self.ranks.device)  # from the CPU, if offloaded
                yield name, cast("DTensor", shards).full_tensor().cpu()
