"""The microbatch and the step of our own loop, for engines that leave both to us.

An engine decides where gradients go, how their norm is taken over the ranks, and what an update is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from trainer.engines.base import Update
from trainer.ranks import Ranks
from trainer.scaling import loss_scaler
from trainer.settings import Settings
from trainer.timer import Timer


class NativeEngine(ABC):
    """Loss scaling, averaging and clipping, the same for ZeRO and for FSDP."""

    model: nn.Module

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.timer = Timer(synchronize=ranks.device.type == "cuda")
        self.scaler = loss_scaler(settings)

    @abstractmethod
    def _after_backward(self, *, last: bool) -> None:
        """Bring this micro batch's gradients to their sums."""

    @property
    @abstractmethod
    def _summed(self) -> int:
        """How many micro batches' gradients the sums are the sum of."""

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """The sums that this rank updates from."""

    @abstractmethod
    def _norm(self, gradients: list[Tensor]) -> float:
        """The 2-norm of all ranks' sums; the same on every rank, inf when one is not finite."""

    @abstractmethod
    def _update(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        """Change the weights by the sums times ``scale``; the sums are used up."""

    @abstractmethod
    def discard(self) -> None:
        """See Engine."""

    def microbatch(self, tokens: Tensor, *, last: bool) -> Tensor:
        """See Engine."""
        with self.timer("forward"):
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        with self.timer("backward"):
            (loss.float() * self.scaler.scale).backward()
            self._after_backward(last=last)
        return loss.detach().float()

    def step(self, lr: float) -> Update:
        """See Engine."""
        with self.timer("step"), torch.no_grad():
            gradients = self._gradients()
            divisor = self.scaler.scale * self._summed
            average = self._norm(gradients) / divisor
            finite = math.isfinite(average)
            if finite:
                clip = self.settings.clip
                excess = max(1.0, (average + 1e-6) / clip) if clip else 1.0
                self._update(gradients, 1.0 / (divisor * excess), lr)
            self.scaler.update(overflow=not finite)
        self.discard()
        return Update(average, skipped=not finite)
