"""What both generations of FSDP share: the gradients, the optimizer, the checkpoints.

Parameters, gradients and moments are fp32 shards; FSDP casts what it gathers. A generation decides
how the model is wrapped, and how its parameters are seen whole and as shards.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.checkpoint import fsdp as files
from trainer.checkpoint import megatron, megatron_read
from trainer.checkpoint.directory import layout
from trainer.engines.base import ModelState
from trainer.engines.first_weights import FirstWeights
from trainer.engines.native import NativeEngine
from trainer.engines.units import units
from trainer.errors import CheckpointError, SettingsError
from trainer.optimizer import ParamGroup, hyperparameters, param_groups, trainable
from trainer.ranks import Ranks
from trainer.settings import Settings
from trainer.tensors import storage_bytes
from trainer.zero.norm import norm


class ShardedEngine(NativeEngine):
    """A model that FSDP shards, and an AdamW over the shards."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.mesh = self._data_mesh()
        weights = FirstWeights(settings, ranks)
        self.shapes = {name: tuple(p.shape) for name, p in weights.model.named_parameters()}
        # Shapes and frozen parameters are asked for before they become shards of their unit.
        shapes = [(name, tuple(p.shape)) for name, p in trainable(weights.model)]
        self._elements = sum(math.prod(shape) for _, shape in shapes)
        with quiet():
            weights.model = self._cut(weights.model)
            self.units = units(weights.model, settings)
            self._check(weights.model)
            self.model = self._wrap(weights)
        self.groups = self._own(param_groups(shapes, settings))
        self.optimizer = self._optimizer()
        self._gradient_bytes = 0

    # What a generation decides

    @abstractmethod
    def _check(self, model: nn.Module) -> None:
        """Refuse settings that this generation cannot follow."""

    def _cut(self, model: nn.Module) -> nn.Module:
        """This rank's part of the model, to be sharded over its data-parallel ranks: all of it."""
        return model

    def _own(self, groups: list[ParamGroup]) -> list[ParamGroup]:
        """The groups' parameters that this rank's part of the model has: all."""
        return groups

    def _data_mesh(self) -> DeviceMesh:
        """The ranks that share the model."""
        axes = data_axes(self.settings)
        names, sizes = tuple(axes), tuple(axes.values())
        return init_device_mesh(self.ranks.device.type, sizes, mesh_dim_names=names)

    @abstractmethod
    def _wrap(self, weights: FirstWeights) -> nn.Module:
        """Shard the model."""

    @abstractmethod
    def _params(self, groups: list[ParamGroup]) -> list[list[nn.Parameter]]:
        """What the optimizer updates, for each group."""

    @abstractmethod
    def _shard(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that lies on this rank."""

    @abstractmethod
    def _live(self) -> Iterator[Tensor]:
        """Every tensor that holds parameters, whether shards or gathered."""

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See Engine."""

    # The step

    def _after_backward(self, *, last: bool) -> None:
        """FSDP has reduced every micro batch at once.

        To reduce only the last one (``no_sync``) would save communication and keep whole gradients
        on every rank, which is what sharding is there to avoid.
        """

    @property
    def _summed(self) -> int:
        return self.settings.accumulation  # FSDP has divided by the number of ranks

    def _gradients(self) -> list[Tensor]:
        gradients = [self._shard(p.grad).view(-1) for p in self._updated() if p.grad is not None]
        self._gradient_bytes = storage_bytes(gradients)
        return gradients

    def _norm(self, gradients: list[Tensor]) -> float:
        """The global norm of the gradients; of replicas, the first one is asked."""
        if self.settings.fsdp_sharding_strategy == "NO_SHARD":
            return norm(gradients, self._elements, reduce_on=None)
        first_replica = self.ranks.rank < self.mesh.size(self.mesh.ndim - 1)
        pieces = [gradient.to(self.ranks.device) for gradient in gradients if first_replica]
        return norm(pieces, self._elements, reduce_on=self.ranks.device)

    def _update(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        for gradient in gradients:
            gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    # The Engine protocol

    def discard(self) -> None:
        """See Engine."""
        self.optimizer.zero_grad()

    def save(self, directory: Path, progress: dict[str, Any]) -> None:
        """See Engine: Accelerate's files, which hold no progress, or Megatron-LM's."""
        settings = self.settings
        if settings.state_dict_type == "megatron":
            with quiet():
                megatron.write(directory, self, progress)
            return
        sharded = settings.state_dict_type == "sharded"
        form = settings.sharded_files if sharded else settings.state_dict_type
        with quiet():
            files.save(directory, form, self.model, self.optimizer, self.ranks)

    def load(self, directory: Path) -> dict[str, Any] | None:
        """See Engine: any form of Accelerate's files or Megatron-LM's, whatever this run writes.

        Raises:
            CheckpointError: it does not fit this run.
        """
        if layout(directory) == "Megatron-LM":
            return self._load_megatron(directory)
        with quiet():
            files.load(directory, self.model, self.optimizer, self.ranks)
        # torch takes these from the checkpoint; what the settings say holds.
        for group, own in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(hyperparameters(self.settings, own.weight_decay, group["lr"]))
        return None

    def _load_megatron(self, directory: Path) -> dict[str, Any]:
        if self.settings.strategy == "fsdp":
            raise CheckpointError(
                f"{directory} has Megatron-LM's layout, and FSDP 1 has no parameters to fill",
                "resume with --strategy fsdp2",
            )
        with torch.no_grad(), self.ranks.together("read the checkpoint"):
            return megatron_read.read(directory, self)
        raise AssertionError  # ``together`` has raised

    def model_state(self) -> ModelState:
        """See Engine. Between steps there are no gradients: those of the last step count."""
        moments = (t for state in self.optimizer.state.values() for t in state.values())
        return ModelState(
            parameters=storage_bytes(self._live()),
            gradients=self._gradient_bytes or storage_bytes(map(self._shard, self._updated())),
            optimizer=storage_bytes(map(self._shard, moments)),
        )

    # The optimizer

    def _optimizer(self) -> torch.optim.AdamW:
        settings = self.settings
        optimizer = torch.optim.AdamW(
            [
                {"params": params, **hyperparameters(settings, group.weight_decay, settings.lr)}
                for group, params in zip(self.groups, self._params(self.groups), strict=True)
            ]
        )
        # The moments exist from the start: a checkpoint can be read into them, and one that is
        # written before the first update is right. (Left to itself, torch makes them with a step
        # of zero gradients, and counts that step.)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.numel():  # FSDP 1: this rank may have no piece of it
                    optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return optimizer

    def _updated(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def hybrid(settings: Settings) -> bool:
    """Whether the model is sharded inside replicas, and not over all ranks."""
    return "HYBRID" in settings.fsdp_sharding_strategy and settings.grid.dp > 1


def data_axes(settings: Settings) -> dict[str, int]:
    """Data-parallel ranks a mesh axis: all in a row, or (replicate, shard) where hybrid.

    Raises:
        SettingsError: replicas of that size do not fit.
    """
    world = settings.grid.dp
    if not hybrid(settings):
        return {"shard": world}
    half = world // 2 if world % 2 == 0 and world > 2 else world
    size = settings.fsdp_hybrid_size or half
    if size < 2 or world % size:
        raise SettingsError(
            f"fsdp_hybrid_size {size}: {world} ranks cannot form replicas of {size} ranks",
            f"give a divisor of {world} from 2 on; without sharding, use NO_SHARD",
        )
    return {"replicate": world // size, "shard": size}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch about what these engines are asked to do."""
    known = (
        "The `NO_SHARD` sharding strategy is deprecated",
        "FSDP.state_dict_type",
        "FSDP.set_state_dict_type",
        "When using ``NO_SHARD`` for ``ShardingStrategy``",
        "Please use DTensor instead",
        ".* has both parameters with requires_grad=True and False",
        "`_get_pg_default_device` will be deprecated",
        "Multiple backends are registered with this ProcessGroup",
        "FSDP2-wrapped module .* returned a view tensor",  # nothing is done in place here
    )
    # Of the two gathers that a parameter cut by tensor and then sharded takes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for message in known:
            warnings.filterwarnings("ignore", message=message)
        yield
