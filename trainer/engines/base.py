"""What the loop asks of an engine, whichever way it spreads the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer.scaling import LossScaler
from trainer.timer import Timer


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    """Of the averaged gradients, unscaled, before clipping; inf or nan on overflow."""
    skipped: bool
    """The gradients were not finite and nothing changed."""


@dataclass(frozen=True)
class ModelState:
    """Bytes that this rank keeps between steps."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights and moments."""
    accumulators: int = 0
    """What the canonical reduction keeps beside the gradients."""


class Engine(Protocol):
    """A model, its optimizer, and how both lie on the ranks.

    Every method is collective: all ranks call it, in the same order.
    """

    scaler: LossScaler
    """Gives the scale of the next backward pass; ``step`` updates it. The loop saves it."""
    timer: Timer
    """Where the engine says what it spends time on."""

    def microbatch(self, tokens: Tensor, *, last: bool) -> Tensor:
        """Run forward and backward on ``tokens`` (micro_batch, seq_len); add to the gradients.

        Args:
            last: of this step on this rank.

        Returns:
            The mean loss of these tokens, a float32 scalar, detached. A pipeline, which runs when
            it has all micro batches, fills it in by the end of the call with ``last``.
        """
        ...

    def step(self, lr: float) -> Update:
        """Average the gradients over the step's micro batches, clip, update, and clear them."""
        ...

    def discard(self) -> None:
        """Clear the gradients of a step that is skipped for its loss."""
        ...

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full (fqn, tensor on the CPU) in model order, ties once, fp32 masters where there are.

        Tensors are valid until the next one is asked for. All ranks must iterate to the end.
        """
        ...

    def save(self, directory: Path, progress: dict[str, Any]) -> None:
        """Write this rank's files into ``directory``, which exists and is shared.

        Args:
            progress: keys ``step`` (optimizer steps done, skipped ones included), ``skipped``,
                ``samples`` (drawn so far), ``updates`` (steps that changed the weights).
        """
        ...

    def load(self, directory: Path) -> dict[str, Any] | None:
        """Take weights and optimizer from ``directory``.

        Returns:
            ``progress`` as far as the engine's own files tell it (a checkpoint of the real
            framework has no ``trainer_state.json``), or None when they do not.

        Raises:
            CheckpointError: files are missing, or of another shape, strategy or world size.
        """
        ...

    def model_state(self) -> ModelState:
        """Bytes of model state on this rank, measured from the tensors that exist."""
        ...
