"""A model cut by tensor, stage and expert; each part sharded (fsdp2) or replicated (ddp).

Each cut parameter is a DTensor, which ``fully_shard`` cuts once more over the ranks that share it.
Replicas are shards of one rank, so that ddp needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from trainer.engines.fsdp2 import Fsdp2Engine
from trainer.engines.sharded import data_axes, quiet
from trainer.errors import SettingsError
from trainer.model import configuration
from trainer.optimizer import ParamGroup
from trainer.parallel import experts, pipeline, tensor
from trainer.ranks import Ranks
from trainer.settings import Settings
from trainer.zero.norm import norm


class GridEngine(Fsdp2Engine):
    """FSDP 2 or DDP over a model that is itself cut."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._collected: list[Tensor] = []
        self._losses: list[Tensor] = []
        super().__init__(settings, ranks)
        own = [name for name, _ in self.model.named_parameters()]
        stages = ranks.gather((self._place("pp"), own))
        self._stage_of = {name: stage for stage, names in stages for name in names}
        self._pipeline: pipeline.Pipeline | None = None
        if settings.pp > 1:
            self._pipeline = pipeline.Pipeline(
                self.model,
                self.grid_mesh.get_group("pp"),
                ranks.device,
                settings.pp_schedule,
                self._scaled_loss,
            )

    # The cut

    def _data_mesh(self) -> DeviceMesh:
        settings, grid = self.settings, self.settings.grid
        ddp = settings.strategy == "ddp"
        data = {"replicate": grid.dp, "shard": 1} if ddp else data_axes(settings)
        data = {f"dp_{name}": size for name, size in data.items()}
        axes = {"pp": grid.pp, **data, "ep": grid.ep, "tp": grid.tp}
        self.grid_mesh = init_device_mesh(
            self.ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        return self.grid_mesh[tuple(data)]

    def _place(self, axis: str) -> int:
        return self.grid_mesh.get_local_rank(axis)

    def _cut(self, model: nn.Module) -> nn.Module:
        settings = self.settings
        config = configuration(settings)
        _check_dropout(config)
        self._loss = cast("Any", model).loss_function
        if settings.pp > 1:
            model = pipeline.Stage(model, self._place("pp"), settings.pp)
            if not any(p.requires_grad for p in model.parameters()):
                raise SettingsError(
                    "every parameter of a stage is frozen: nothing flows back through it",
                    "freeze less, or use --pp 1",
                    one_rank=True,
                )
        if settings.tp > 1:
            tensor.cut(model, self.grid_mesh["tp"], config)
        if settings.ep > 1:
            experts.cut(model, self.grid_mesh["ep"])
        return model

    def _check(self, model: nn.Module) -> None:
        if self.settings.strategy == "fsdp2":
            super()._check(model)

    def _own(self, groups: list[ParamGroup]) -> list[ParamGroup]:
        own = {name for name, _ in self.model.named_parameters()}
        kept = [
            ParamGroup(tuple(name for name in group.names if name in own), group.weight_decay)
            for group in groups
        ]
        return [group for group in kept if group.names]

    # The step

    def microbatch(self, tokens: Tensor, *, last: bool) -> Tensor:
        """See Engine."""
        if self._pipeline is None:
            with quiet():
                return super().microbatch(tokens, last=last)
        self._collected.append(tokens)
        self._losses.append(torch.zeros((), device=self.ranks.device))
        loss = self._losses[-1]
        if last:
            with self.timer("pipeline"), quiet():
                found = self._pipeline.run(self._collected) / self.scaler.scale
                dist.all_reduce(found, group=self.grid_mesh.get_group("pp"))
            for one, value in zip(self._losses, found, strict=True):
                one.copy_(value)
            self._collected, self._losses = [], []
        return loss

    def _scaled_loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        loss: Tensor = self._loss(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
        return loss.float() * self.scaler.scale

    def _norm(self, gradients: list[Tensor]) -> float:
        """Of what several ranks have, the first one is asked."""
        updated = (p for p in self._updated() if p.grad is not None)
        pieces = [
            gradient.to(self.ranks.device)
            for parameter, gradient in zip(updated, gradients, strict=True)
            if self._speaks_for(cast("DTensor", parameter))
        ]
        return norm(pieces, self._elements, reduce_on=self.ranks.device)

    def _speaks_for(self, parameter: DTensor) -> bool:
        """Whether this rank is the first on every axis that does not cut the parameter."""
        axes = parameter.device_mesh.mesh_dim_names or ()
        hows = zip(axes, parameter.placements, strict=True)
        cut = {axis for axis, how in hows if not isinstance(how, Replicate)}
        others = {*(self.grid_mesh.mesh_dim_names or ())} - {"pp", *cut}
        return all(self._place(axis) == 0 for axis in others)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See Engine: gathered one by one in their stage, which tells the others."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, shape in self.shapes.items():
                if name in own:
                    shards = cast("DTensor", own[name].detach().to(self.ranks.device))
                    whole = shards.full_tensor()
                else:
                    whole = torch.empty(shape, device=self.ranks.device)
                if self.settings.pp > 1:
                    group = self.grid_mesh.get_group("pp")
                    dist.broadcast(whole, group=group, group_src=self._stage_of[name])
                yield name, whole.cpu()


def _check_dropout(config: Any) -> None:
    """Ranks that share activations would have to draw the same masks, or parts of them."""
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop", "jitter_noise")) and value:
            raise SettingsError(
                f"{name} is {value}: what it draws would depend on how the model is cut",
                "use --dropout 0, or --tp 1 --pp 1 --ep 1",
            )
