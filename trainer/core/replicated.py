"""Stages 0, 1 and 2: every rank holds the whole model, in flat tensors.

Each parameter is a view of its param group's flat tensor, so that one all-gather refreshes the
whole group after the step::

    flat tensor      | aaaaaaaaaaa bbbbb cccccccc .. |     16-bit, whole on every rank
    rank 0 writes    | ^^^^^^^^^^^^^^^               |     its piece of the fp32 master, rounded
    rank 1 writes    |                ^^^^^^^^^^^^^^ |     then all ranks gather the pieces
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.core.partition import Partition, Shapes, partition_groups
from trainer.core.ranks import Ranks
from trainer.core.settings import CoreSettings
from trainer.core.zero import ZeroEngine


class FlatParameters:
    """The whole model on this rank, laid out as ``partition`` cuts it.

    Each parameter becomes a view of its flat tensor, in ``dtype``, and keeps its values.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._partition = partition
        self._rank = rank
        self._wholes = [
            torch.zeros(partition.world * flat.piece_numel, dtype=dtype, device=device)
            for flat in partition.flats
        ]
        for name, runs in partition.runs.items():
            parameter = parameters[name]
            count = math.prod(parameter.shape)
            if not count:
                continue
            first = runs[0]
            begin = first.rank * partition.flats[first.flat].piece_numel + first.offset
            view = self._wholes[first.flat][begin : begin + count].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    def write(self, index: int, master: Tensor) -> None:
        """Write this rank's new master into its piece, rounded to the parameters' dtype."""
        self._own_piece(index).copy_(master)

    def gather(self, ranks: Ranks) -> None:
        """Receive the other ranks' pieces."""
        for index, whole in enumerate(self._wholes):
            ranks.all_gather(whole, self._own_piece(index))

    def _own_piece(self, index: int) -> Tensor:
        numel = self._partition.flats[index].piece_numel
        return self._wholes[index][self._rank * numel : (self._rank + 1) * numel]


class ReplicatedEngine(ZeroEngine):
    """Writes masters into flat parameters, which the ranks then gather from each other."""

    def __init__(self, settings: CoreSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self._parameters = FlatParameters(
            self.shard.partition, self.shard.rank, self.trainable, self.dtype, ranks.device
        )

    def _partition_optimizer(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return partition_groups(groups, shapes, self.ranks.world)

    def _write_parameters(self, index: int, master: Tensor) -> None:
        self._parameters.write(index, master)

    def _exchange_parameters(self) -> None:
        self._parameters.gather(self.ranks)


class FullGradientsEngine(ReplicatedEngine):
    """Keeps whole gradients on every rank until the backward pass is over (stages 0 and 1).

    Canonical reduction adds every micro batch at its owner. Fast reduction lets autograd add this
    rank's micro batches (in the parameters' dtype) and reduces once, before the step.
    """

    def _end_microbatch(self, *, last: bool) -> None:
        gradients = [(name, p.grad) for name, p in self.trainable.items() if p.grad is not None]
        if self.settings.reduction == "canonical" or last:
            self.reducer.add(gradients, self.active_ranks)
            for parameter in self.trainable.values():
                parameter.grad = None
