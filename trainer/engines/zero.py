"""What ddp and the ZeRO stages share: the optimizer shard, the sums, the state that is saved.

A stage decides three things: where gradients go as the backward pass makes them
(``_after_backward``), how the sums reach the optimizer (``_gradients``), and how new masters become
parameters (``_publish``, ``_published``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import model
from trainer.checkpoint import deepspeed, deepspeed_read
from trainer.engines.base import ModelState
from trainer.engines.native import NativeEngine
from trainer.optimizer import param_groups, trainable
from trainer.ranks import Ranks
from trainer.settings import Settings
from trainer.tensors import DTYPES, storage_bytes
from trainer.zero.norm import norm
from trainer.zero.offload import Home
from trainer.zero.partition import Partition, Shapes
from trainer.zero.reduce import Reducer
from trainer.zero.shard import OptimizerShard


class ZeroEngine(NativeEngine):
    """A 16-bit (or fp32) model with fp32 masters and moments, each rank owning some of them."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.dtype = DTYPES[settings.precision]
        self.model = model.build(settings).to(ranks.device)
        self.trainable = dict(trainable(self.model))
        shapes = {name: tuple(p.shape) for name, p in self.trainable.items()}
        self.groups = param_groups(shapes.items(), settings)
        names = [group.names for group in self.groups]
        self.shard = OptimizerShard(
            self._owned(names, shapes),
            self._owner,
            self.groups,
            settings,
            Home(settings.offload_optimizer, ranks.device, settings.nvme_path),
            lambda name: self.trainable[name].detach(),
        )
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.reducer = Reducer(
            self._reduced(names, shapes),
            ranks,
            DTYPES[settings.grad_dtype],
            self.timer,
            canonical=settings.reduction == "canonical",
        )

    # What a stage decides

    @property
    def _owner(self) -> int:
        """This rank's place in the optimizer's partition."""
        return self.ranks.rank

    @abstractmethod
    def _owned(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        """Who owns which masters and moments."""

    def _reduced(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        """Who sums which gradients: the owner of the master, unless a stage says otherwise."""
        del groups, shapes
        return self.shard.partition

    def _gradients(self) -> list[Tensor]:
        """The sums for this rank's flat tensors."""
        return self.reducer.sums

    @abstractmethod
    def _publish(self, index: int, master: Tensor) -> None:
        """Make parameters of the new master of one flat tensor."""

    @abstractmethod
    def _published(self) -> None:
        """All of this rank's masters are published: let the ranks see each other's."""

    # The step

    @property
    def _summed(self) -> int:
        return self.settings.microbatches

    def _norm(self, gradients: list[Tensor]) -> float:
        partition = self.shard.partition
        reduce_on = self.ranks.device if partition.world > 1 else None
        return norm(gradients, partition.numel, reduce_on=reduce_on)

    def _update(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        self.shard.update(gradients, scale, lr, self._publish)
        self._published()

    # The Engine protocol

    def discard(self) -> None:
        """See Engine."""
        self.reducer.clear()
        for parameter in self.trainable.values():
            parameter.grad = None

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See Engine: masters of what trains, parameters of what is frozen."""
        partition = self.shard.partition
        for name, parameter in self.model.named_parameters():
            if name not in self.trainable:
                yield name, self._frozen(name)
                continue
            whole = torch.empty(parameter.numel(), device=self.ranks.device)
            for run in partition.runs[name]:
                piece = whole[run.start : run.stop]
                if run.rank == self._owner:
                    master = self.shard.states[run.flat].master
                    piece.copy_(master.piece(run.offset, run.offset + run.numel))
                if partition.world > 1:
                    dist.broadcast(piece, src=run.rank)
            yield name, whole.view(parameter.shape).cpu()

    def save(self, directory: Path, progress: dict[str, Any]) -> None:
        """See Engine: DeepSpeed's own files."""
        deepspeed.write(directory, self, progress)

    def load(self, directory: Path) -> dict[str, Any] | None:
        """See Engine: DeepSpeed's own files, of any stage and any number of ranks."""
        with torch.no_grad(), self.ranks.together("read the checkpoint"):
            progress = deepspeed_read.read(directory, self)
        with torch.no_grad():
            for index, state in enumerate(self.shard.states):
                self._publish(index, state.master.get())
            self._published()
        return progress

    def model_state(self) -> ModelState:
        """See Engine."""
        return ModelState(
            parameters=self._parameter_bytes(),
            gradients=self._gradient_bytes(),
            optimizer=self.shard.resident,
            accumulators=self._accumulator_bytes(),
        )

    # Frozen parameters, and what a stage that cuts them says instead

    def _frozen(self, name: str) -> Tensor:
        """A whole frozen parameter, on the CPU."""
        return self.model.get_parameter(name).detach().cpu()

    def frozen_fragments(self) -> dict[str, Tensor]:
        """What this rank keeps of each frozen parameter: all of it, before stage 3."""
        named = self.model.named_parameters()
        return {name: p.detach() for name, p in named if not p.requires_grad}

    def set_frozen(self, name: str, whole: Tensor) -> None:
        """Give a frozen parameter its value."""
        self.model.get_parameter(name).data.copy_(whole)

    # Memory

    def _parameter_bytes(self) -> int:
        return storage_bytes(parameter.data for parameter in self.model.parameters())

    def _gradient_bytes(self) -> int:
        return storage_bytes(self.reducer.sums)

    def _accumulator_bytes(self) -> int:
        return 0
