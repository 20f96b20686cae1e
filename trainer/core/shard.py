"""This rank's shard of the optimizer: flat fp32 master weights and AdamW moments.

::

    flat tensor i      master      exp_avg     exp_avg_sq      each float32 of Flat.numel elements
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.core.offload import Slot, SlotFactory
from trainer.core.optimizer import ParamGroup, apply_adamw
from trainer.core.partition import Partition
from trainer.core.settings import CoreSettings

STATE = ("exp_avg", "exp_avg_sq")


@dataclass
class FlatState:
    """The fp32 master and moments of one flat tensor, each of ``Flat.numel`` elements."""

    master: Slot
    exp_avg: Slot
    exp_avg_sq: Slot
    step: Tensor
    """0-d float32, the number of updates."""

    @property
    def slots(self) -> tuple[Slot, Slot, Slot]:
        """The slots of master, exp_avg and exp_avg_sq."""
        return self.master, self.exp_avg, self.exp_avg_sq


class OptimizerShard:
    """The optimizer state of the flat tensors that rank ``rank`` of ``partition`` owns.

    Args:
        partition: how the parameters are cut into flat tensors.
        rank: this rank's number in the partition.
        groups: the param groups, for their weight decay.
        settings: AdamW's hyper-parameters.
        offload: where masters and moments are kept between steps.
        get_initial: name -> full float32 parameter, the first master.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        groups: list[ParamGroup],
        settings: CoreSettings,
        offload: SlotFactory,
        get_initial: Callable[[str], Tensor],
    ) -> None:
        self.partition = partition
        self.rank = rank
        self.states: list[FlatState] = []
        self._groups = groups
        self._settings = settings
        masters = [torch.zeros(flat.numel) for flat in partition.flats]
        for run in partition.runs_of_rank(rank):
            piece = get_initial(run.name).reshape(-1)[run.start : run.stop]
            masters[run.flat][run.offset : run.offset + run.numel] = piece
        for master in masters:
            zeros = torch.zeros_like(master)
            self.states.append(
                FlatState(
                    master=offload.make_slot(master),
                    exp_avg=offload.make_slot(zeros),
                    exp_avg_sq=offload.make_slot(zeros),
                    step=torch.zeros(()),
                )
            )

    def update(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        """Apply one AdamW step to every flat tensor.

        Args:
            gradients: one for each flat tensor, any float dtype; they may be overwritten.
            scale: the factor that the gradients are multiplied by first.
            lr: the learning rate.
        """
        for index, (flat, state) in enumerate(zip(self.partition.flats, self.states, strict=True)):
            master, first, second = values = [slot.get() for slot in state.slots]
            gradient = gradients[index].to(master.device, torch.float32).mul_(scale)
            decay = self._groups[flat.group].weight_decay
            settings = self._settings
            apply_adamw(master, gradient, (first, second), state.step, settings, decay, lr)
            for slot, value in zip(state.slots, values, strict=True):
                slot.put(value)

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory between steps."""
        return sum(slot.resident_bytes for state in self.states for slot in state.slots)
