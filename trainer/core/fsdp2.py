"""FSDP 2, torch's ``fully_shard``: each parameter is a DTensor, cut into rows over the ranks.

::

    unit "layer 0"        q_proj (64, 64)     norm (64)
    rank 0 of 2           rows 0-31           elements 0-31
    rank 1 of 2           rows 32-63          elements 32-63

Forward and backward of a unit gather its parameters, in the precision of the run; the backward pass
ends with a reduce-scatter of their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from trainer.core.engine import DTYPES
from trainer.core.errors import SettingsError
from trainer.core.fsdp import FsdpEngine


class Fsdp2Engine(FsdpEngine):
    """Shards with ``fully_shard``, unit by unit."""

    def _check(self) -> None:
        settings = self.settings
        # The collectives record events on streams, and with torch 2.6 those of the CPU have none.
        if self.ranks.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise SettingsError(
                f"FSDP 2 of torch {torch.__version__} does not run on the CPU",
                "use --strategy fsdp, or a newer torch",
            )
        unsupported = {
            "fsdp_sharding_strategy NO_SHARD": settings.fsdp_sharding_strategy == "NO_SHARD",
            "fsdp_use_orig_params false": not settings.fsdp_use_orig_params,
        }
        for option, chosen in unsupported.items():
            if chosen:
                raise SettingsError(
                    f"FSDP 2 does not support {option}", "leave it out, or use --strategy fsdp"
                )

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._check()
        for unit in reversed(self.units.values()):  # inner units first
            self._fully_shard(unit)
        self._fully_shard(model, is_root=True)
        return model

    def _fully_shard(self, unit: nn.Module, *, is_root: bool = False) -> None:
        settings = self.settings
        after_forward = settings.fsdp_sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
        pinned = self.ranks.device.type == "cuda"
        offload = settings.fsdp_offload_params
        fully_shard(
            unit,
            mesh=self.mesh,
            # The backward pass needs the parameters of the root at once.
            reshard_after_forward=after_forward and not is_root,
            mp_policy=self._make_precision_policy(),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        )

    def _make_precision_policy(self) -> MixedPrecisionPolicy:
        if self.settings.precision == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[self.settings.precision],
            reduce_dtype=DTYPES[self.settings.grad_dtype],
        )

    def _select_parameters(self) -> list[list[nn.Parameter]]:
        live = dict(self.model.named_parameters())
        return [[live[name] for name in group.names] for group in self.groups]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the parameters one by one, see Engine."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                shards = parameter.detach().to(self.ranks.device)  # from the CPU, if offloaded
                yield name, cast("DTensor", shards).full_tensor().cpu()
