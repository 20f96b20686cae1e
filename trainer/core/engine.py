"""What the loop needs from an engine, and the step that all engines share.

An engine is a model, its optimizer, and how both are distributed over the ranks. Per micro batch
the loop calls ``run_microbatch``; after the last one it calls ``step``::

    run_microbatch   forward, backward -> _end_microbatch
    step             _collect_gradients -> _compute_norm -> clip -> _update_weights

ZeRO stages 2 and 3 and FSDP add gradients to the sums of all ranks during the backward pass, stages
0 (ddp) and 1 in ``_end_microbatch``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.core.ranks import Ranks
from trainer.core.scaling import make_loss_scaler
from trainer.core.settings import CoreSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The settings' names of dtypes."""


@dataclass(frozen=True)
class Update:
    """The result of one optimizer step."""

    grad_norm: float
    """Norm of the averaged gradients, unscaled, before clipping; inf on overflow."""
    skipped: bool
    """Whether the gradients were not finite, so that no weight changed."""


class Engine(ABC):
    """A model and its optimizer on several ranks.

    Every method is collective: all ranks call it, in the same order.

    Attributes:
        scaler: the loss scale of the next backward pass; ``step`` updates it, and checkpoints hold
            it.
    """

    model: nn.Module

    def __init__(self, settings: CoreSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.scaler = make_loss_scaler(settings)
        self.active_ranks = ranks.world

    # What the loop calls

    def run_microbatch(self, tokens: Tensor, *, active_ranks: int, last: bool) -> Tensor:
        """Run forward and backward on ``tokens`` (micro_batch, seq_len); add to the gradients.

        Args:
            tokens: token numbers, int64.
            active_ranks: the gradients of the first so many ranks are added; in the last round of
                a step, the other ranks may have no micro batch of their own (see ``loop``).
            last: whether this is the last round of the step; ddp and ZeRO 1 with fast reduction
                reduce only then.

        Returns:
            The mean loss of these tokens, a float32 scalar, detached.
        """
        self.active_ranks = active_ranks  # for the hooks that add gradients in the backward pass
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        (loss.float() * self.scaler.scale).backward()
        self._end_microbatch(last=last)
        return loss.detach().float()

    def step(self, lr: float) -> Update:
        """Average the gradients over the step's micro batches, clip, update, and clear them."""
        with torch.no_grad():
            gradients = self._collect_gradients()
            divisor = self.scaler.scale * self._summed_microbatches
            grad_norm = self._compute_norm(gradients) / divisor
            finite = math.isfinite(grad_norm)
            if finite:
                clip = self.settings.clip
                # DeepSpeed's formula (0.19.8 runtime/zero/stage_1_and_2.py).
                excess = max(1.0, (grad_norm + 1e-6) / clip) if clip else 1.0
                self._update_weights(gradients, 1.0 / (divisor * excess), lr)
            self.scaler.update(overflow=not finite)
        self._clear_gradients()
        return Update(grad_norm, skipped=not finite)

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor on the CPU) of each parameter in model order, tied ones once.

        Trained parameters have their fp32 values. The tensors may share memory with the model. All
        ranks must iterate to the end.
        """

    # What differs between engines

    @abstractmethod
    def _end_microbatch(self, *, last: bool) -> None:
        """Add the gradients that the backward pass has left to the sums over all ranks."""

    @property
    @abstractmethod
    def _summed_microbatches(self) -> int:
        """Number of micro batches in the sums; FSDP may have averaged over the ranks already."""

    @abstractmethod
    def _collect_gradients(self) -> list[Tensor]:
        """Return the sums that this rank updates its weights from."""

    @abstractmethod
    def _compute_norm(self, gradients: list[Tensor]) -> float:
        """Return the 2-norm of all ranks' sums, inf if one is not finite; equal on all ranks."""

    @abstractmethod
    def _update_weights(self, gradients: list[Tensor], scale: float, lr: float) -> None:
        """Change the weights by the sums times ``scale``; the sums may be overwritten."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Clear the gradients and their sums, after each step."""
