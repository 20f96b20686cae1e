"""FSDP 1, torch's FullyShardedDataParallel: a unit is one flat parameter, cut in equal pieces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from trainer.core.engine import DTYPES
from trainer.core.errors import SettingsError
from trainer.core.fsdp import FsdpEngine
from trainer.core.fsdp_units import find_unit, is_hybrid

_WRAPPER = "_fsdp_wrapped_module."
"""What FSDP 1 inserts into the name of a parameter for each unit that it is in."""


class Fsdp1Engine(FsdpEngine):
    """Shards with FullyShardedDataParallel and the options that Accelerate has for it."""

    def _check(self, model: nn.Module) -> None:
        settings = self.settings
        if settings.fsdp_offload_params and self.ranks.device.type == "cpu":
            raise SettingsError(
                "fsdp_offload_params needs a GPU: FSDP 1 offloads through its pinned memory",
                "leave it out; on a CPU the parameters are in host memory already",
            )
        if is_hybrid(settings, self.ranks.world) and settings.state_dict_type == "local":
            raise SettingsError(
                f"PyTorch makes no local state dict with {settings.fsdp_sharding_strategy}",
                "use --state-dict-type sharded",
            )
        if not settings.fsdp_use_orig_params:
            self._check_flat(model)

    def _check_flat(self, model: nn.Module) -> None:
        """Refuse a flat parameter whose members differ in weight decay or in being trained."""
        if len({group.weight_decay for group in self.groups}) > 1:
            raise SettingsError(
                "with fsdp_use_orig_params false, the decayed matrices and undecayed vectors of a "
                "unit are one parameter, which cannot be in two param groups",
                "use --param-groups single, or --fsdp-use-orig-params",
            )
        trained: dict[str, tuple[str, bool]] = {}
        for name, parameter in model.named_parameters():
            unit = find_unit(name, self.units)
            other, trains = trained.setdefault(unit, (name, parameter.requires_grad))
            if trains != parameter.requires_grad:
                frozen, live = (name, other) if trains else (other, name)
                raise SettingsError(
                    f"with fsdp_use_orig_params false, {frozen} cannot be frozen: it is one "
                    f"parameter with {live}, which trains",
                    "freeze whole units, or use --fsdp-use-orig-params",
                )

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._check(model)
        settings = self.settings
        strategy = settings.fsdp_sharding_strategy if self.ranks.world > 1 else "NO_SHARD"
        chosen = set(self.units.values())
        sharded = FullyShardedDataParallel(
            model,
            # A local state dict refuses a mesh; DCP needs one to save fewer rows than ranks.
            device_mesh=None if settings.state_dict_type == "local" else self.mesh,
            sharding_strategy=ShardingStrategy[strategy],
            cpu_offload=CPUOffload(offload_params=settings.fsdp_offload_params),
            auto_wrap_policy=CustomPolicy(chosen.__contains__),
            mixed_precision=self._make_precision_policy(),
            device_id=self.ranks.device,
            use_orig_params=settings.fsdp_use_orig_params,
        )
        sharded.check_is_root()  # before a unit gathers parameters and takes itself for the root
        return sharded

    def _make_precision_policy(self) -> MixedPrecision | None:
        if self.settings.precision == "fp32":
            return None
        return MixedPrecision(
            param_dtype=DTYPES[self.settings.precision],
            reduce_dtype=DTYPES[self.settings.grad_dtype],
        )

    def _select_parameters(self) -> list[list[nn.Parameter]]:
        if not self.settings.fsdp_use_orig_params:
            return [[p for p in self.model.parameters() if p.requires_grad]]
        live = {name.replace(_WRAPPER, ""): p for name, p in self.model.named_parameters()}
        return [[live[name] for name in group.names] for group in self.groups]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the parameters unit by unit, see Engine."""
        wrapped = {
            name.replace(_WRAPPER, ""): module
            for name, module in self.model.named_modules()
            if isinstance(module, FullyShardedDataParallel)
        }
        for unit, names in groupby(self.shapes, partial(find_unit, units=self.units)):
            module = wrapped[unit]
            with (
                torch.no_grad(),
                FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False),
            ):
                whole = {
                    name.replace(_WRAPPER, ""): parameter
                    for name, parameter in module.named_parameters(prefix=unit)
                }
                for name in names:
                    # A copy: torch frees the gathered storage, which a view (numpy) would forbid.
                    yield name, whole[name].detach().to("cpu", copy=True)
