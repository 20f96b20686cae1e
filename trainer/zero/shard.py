"""This rank's part of the optimizer: flat fp32 masters and AdamW moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.optimizer import ParamGroup, adamw, hyperparameters
from trainer.settings import Settings
from trainer.zero.offload import Home, Slot
from trainer.zero.partition import Partition

STATE = ("exp_avg", "exp_avg_sq")


@dataclass
class FlatState:
    """One flat tensor's fp32 master and moments, each of length ``Flat.numel``, and its step."""

    master: Slot
    exp_avg: Slot
    exp_avg_sq: Slot
    step: Tensor
    """0-d float32: updates done."""

    @property
    def slots(self) -> tuple[Slot, Slot, Slot]:
        """Master, exp_avg, exp_avg_sq."""
        return self.master, self.exp_avg, self.exp_avg_sq


class OptimizerShard:
    """The optimizer state of the flat tensors that rank ``rank`` of ``partition`` owns.

    Args:
        initial: full float32 parameters by name, the first masters.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        groups: list[ParamGroup],
        settings: Settings,
        home: Home,
        initial: Callable[[str], Tensor],
    ) -> None:
        self.partition = partition
        self.rank = rank
        self.states: list[FlatState] = []
        self._groups = groups
        self._settings = settings
        masters = [torch.zeros(flat.numel) for flat in partition.flats]
        for run in partition.of_rank(rank):
            piece = initial(run.name).reshape(-1)[run.start : run.stop]
            masters[run.flat][run.offset : run.offset + run.numel] = piece
        for master in masters:
            zeros = torch.zeros_like(master)
            self.states.append(
                FlatState(
                    master=home.slot(master),
                    exp_avg=home.slot(zeros),
                    exp_avg_sq=home.slot(zeros),
                    step=torch.zeros(()),
                )
            )

    def update(
        self,
        gradients: list[Tensor],
        scale: float,
        lr: float,
        publish: Callable[[int, Tensor], None],
    ) -> None:
        """One AdamW step of every flat tensor.

        Args:
            gradients: one for each flat tensor, any float dtype; used up.
            scale: what the gradients are multiplied with first.
            publish: gets the index and the new master of each flat tensor, valid for the call.
        """
        for index, (flat, state) in enumerate(zip(self.partition.flats, self.states, strict=True)):
            master, first, second = values = [slot.get() for slot in state.slots]
            gradient = gradients[index].to(master.device, torch.float32).mul_(scale)
            decay = self._groups[flat.group].weight_decay
            group = hyperparameters(self._settings, decay, lr)
            adamw(master, gradient, (first, second), state.step, group)
            for slot, value in zip(state.slots, values, strict=True):
                slot.put(value)
            publish(index, master)

    @property
    def resident(self) -> int:
        """Bytes in memory between steps."""
        return sum(slot.resident for state in self.states for slot in state.slots)
