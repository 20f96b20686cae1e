"""Parameters as views of flat tensors: one gather refreshes a whole group (ddp, ZeRO 1, 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.ranks import Ranks
from trainer.zero.partition import Partition


class FlatParameters:
    """The whole model on this rank, laid out as ``partition`` cuts it.

    Each parameter becomes a view of its flat tensor, in ``dtype``; its values move along.
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
            torch.zeros(partition.world * flat.numel, dtype=dtype, device=device)
            for flat in partition.flats
        ]
        for name, runs in partition.runs.items():
            parameter = parameters[name]
            count = math.prod(parameter.shape)
            if not count:
                continue
            first = runs[0]
            begin = first.rank * partition.flats[first.flat].numel + first.offset
            view = self._wholes[first.flat][begin : begin + count].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    def publish(self, index: int, master: Tensor) -> None:
        """Put this rank's new master into its place, rounded to the parameters' dtype."""
        self._piece(index).copy_(master)

    def gather(self, ranks: Ranks) -> None:
        """Take the other ranks' pieces."""
        for index, whole in enumerate(self._wholes):
            ranks.all_gather(whole, self._piece(index))

    def _piece(self, index: int) -> Tensor:
        numel = self._partition.flats[index].numel
        return self._wholes[index][self._rank * numel : (self._rank + 1) * numel]
