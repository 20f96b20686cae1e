"""This rank's shard of the optimizer: flat fp32 master weights and AdamW moments.

::

    flat tensor i      master      exp_avg     exp_avg_sq      each float32 of Flat.piece_numel
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.core.optimizer import ParamGroup, apply_adamw
from trainer.core.partition import Partition
from trainer.core.settings import CoreSettings


@dataclass
class FlatState:
    """The fp32 master and moments of one flat tensor, each of ``Flat.piece_numel`` elements."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """0-d float32, the number of updates."""


class OptimizerShard:
    """The optimizer state of the flat tensors that rank ``rank`` of ``partition`` owns.

    Args:
        partition: how the parameters are cut into flat tensors.
        rank: this rank's number in the partition.
        groups: the param groups, for their weight decay.
        settings: AdamW's hyper-parameters.
        device: where masters and moments are, and where they are updated.
        get_initial: name -> full float32 parameter, the first master.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        groups: list[ParamGroup],
        settings: CoreSettings,
        device: torch.device,
        get_initial: Callable[[str], Tensor],
    ) -> None:
        self.partition = partition
        self.rank = rank
        self.states: list[FlatState] = []
        self._groups = groups
        self._settings = settings
        masters = [torch.zeros(flat.piece_numel, device=device) for flat in partition.flats]
        for run in partition.runs_of_rank(rank):
            piece = get_initial(run.name).reshape(-1)[run.start : run.stop]
            masters[run.flat][run.offset : run.offset + run.numel] = piece
        for master in masters:
            first, second = torch.zeros_like(master), torch.zeros_like(master)
            self.states.append(FlatState(master, first, second, step=torch.zeros(())))

    def update(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        """Apply one AdamW step to every flat tensor.

        Args:
            gradients: one for each flat tensor, any float dtype; they may be overwritten.
            scale: the factor that the gradients are multiplied by first.
            lr: the learning rate.
        """
        for index, (flat, state) in enumerate(zip(self.partition.flats, self.states, strict=True)):
            gradient = gradients[index].to(state.master.device, torch.float32).mul_(scale)
            decay = self._groups[flat.group].weight_decay
            moments = state.exp_avg, state.exp_avg_sq
            apply_adamw(state.master, gradient, moments, state.step, self._settings, decay, lr)
