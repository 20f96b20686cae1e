"""A model cut by tensor, stage and expert; each part is sharded (fsdp2) or replicated (ddp).

Each cut parameter is a DTensor, which ``fully_shard`` cuts once more over the ranks that share it.
A replica is a shard over one rank, so that ddp needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from trainer.config.huggingface import load_model_config
from trainer.core.fsdp2 import Fsdp2Engine
from trainer.core.norm import compute_norm
from trainer.core.optimizer import ParamGroup
from trainer.core.ranks import Ranks
from trainer.errors import SettingsError
from trainer.fsdp_options import ignore_known_warnings, list_data_mesh_axes
from trainer.parallel import experts, pipeline, tensor
from trainer.settings import Settings


class GridEngine(Fsdp2Engine):
    """Trains a model that is itself cut, with FSDP 2 or DDP."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._collected: list[Tensor] = []
        self._losses: list[Tensor] = []
        super().__init__(settings, ranks)
        own = [name for name, _ in self.model.named_parameters()]
        stages = ranks.all_gather_objects((self._axis_index("pp"), own))
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

    def _make_data_mesh(self) -> DeviceMesh:
        settings, grid = self.settings, self.settings.grid
        ddp = settings.strategy == "ddp"
        data = {"replicate": grid.dp, "shard": 1} if ddp else list_data_mesh_axes(settings)
        data = {f"dp_{name}": size for name, size in data.items()}
        axes = {"pp": grid.pp, **data, "ep": grid.ep, "tp": grid.tp}
        self.grid_mesh = init_device_mesh(
            self.ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        return self.grid_mesh[tuple(data)]

    def _axis_index(self, axis: str) -> int:
        return self.grid_mesh.get_local_rank(axis)

    def _cut_model(self, model: nn.Module) -> nn.Module:
        settings = self.settings
        config = load_model_config(settings)
        _check_dropout(config)
        self._loss = cast("Any", model).loss_function
        if settings.pp > 1:
            model = pipeline.Stage(model, self._axis_index("pp"), settings.pp)
            if not any(p.requires_grad for p in model.parameters()):
                raise SettingsError(
                    "every parameter of a pipeline stage is frozen: no gradient passes through it",
                    "use a narrower --freeze, or --pp 1",
                    one_rank=True,
                )
        if settings.tp > 1:
            tensor.cut_layers(model, self.grid_mesh["tp"], config)
        if settings.ep > 1:
            experts.cut_experts(model, self.grid_mesh["ep"])
        return model

    def _check(self, model: nn.Module) -> None:
        if self.settings.strategy == "fsdp2":
            super()._check(model)

    def _select_groups(self, groups: list[ParamGroup]) -> list[ParamGroup]:
        own = {name for name, _ in self.model.named_parameters()}
        kept = [
            ParamGroup(tuple(name for name in group.names if name in own), group.weight_decay)
            for group in groups
        ]
        return [group for group in kept if group.names]

    # The step

    def run_microbatch(self, tokens: Tensor, *, last: bool) -> Tensor:
        """Run forward and backward, or collect a micro batch for the pipeline, see Engine."""
        if self._pipeline is None:
            with ignore_known_warnings():
                return super().run_microbatch(tokens, last=last)
        self._collected.append(tokens)
        self._losses.append(torch.zeros((), device=self.ranks.device))
        loss = self._losses[-1]
        if last:
            with self.timer("pipeline"), ignore_known_warnings():
                losses = self._pipeline.run(self._collected) / self.scaler.scale
                dist.all_reduce(losses, group=self.grid_mesh.get_group("pp"))
            for scalar, value in zip(self._losses, losses, strict=True):
                scalar.copy_(value)
            self._collected, self._losses = [], []
        return loss

    def _scaled_loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        loss: Tensor = self._loss(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
        return loss.float() * self.scaler.scale

    def _compute_norm(self, gradients: list[Tensor]) -> float:
        """Return the global norm; of a gradient that several ranks have, only the first counts."""
        updated = (p for p in self._optimized_parameters() if p.grad is not None)
        pieces = [
            gradient.to(self.ranks.device)
            for parameter, gradient in zip(updated, gradients, strict=True)
            if self._is_first_holder(cast("DTensor", parameter))
        ]
        return compute_norm(pieces, self._numel, reduce_on=self.ranks.device)

    def _is_first_holder(self, parameter: DTensor) -> bool:
        """Return whether this rank is first on every axis that does not cut the parameter."""
        axes = parameter.device_mesh.mesh_dim_names or ()
        placements = zip(axes, parameter.placements, strict=True)
        cut = {axis for axis, how in placements if not isinstance(how, Replicate)}
        others = {*(self.grid_mesh.mesh_dim_names or ())} - {"pp", *cut}
        return all(self._axis_index(axis) == 0 for axis in others)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the parameters one by one in their stage, which broadcasts them, see Engine."""
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
    """Refuse dropout: ranks that share activations would have to draw parts of the same masks."""
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop", "jitter_noise")) and value:
            raise SettingsError(
                f"the model has {name} {value}, and its random masks would depend on how it is cut",
                "use --dropout 0, or --tp 1 --pp 1 --ep 1",
            )
