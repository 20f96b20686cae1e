"""Loss scaling for fp16, with DeepSpeed's rules (deepspeed/runtime/fp16/loss_scaler.py, 0.19.8)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.core.errors import TrainingError
from trainer.core.settings import CoreSettings


@dataclass
class LossScaler:
    """The scale of the next backward pass.

    A dynamic scale doubles after ``window`` steps without overflow, and halves at an overflow when
    the patience is used up: ``hysteresis`` overflows, counted anew when the scale doubles.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    minimum: float = 1.0
    hysteresis: int = 2
    iteration: int = 0
    """Steps counted so far; 0 if the scale is fixed, as no rule needs them."""
    last_overflow: int = -1
    patience: int = 2

    def update(self, *, overflow: bool) -> None:
        """Count one step.

        Raises:
            TrainingError: the gradients overflow at the smallest scale.
        """
        if not self.dynamic:
            return
        if overflow:
            self._back_off()
        else:
            self._grow()
        self.iteration += 1

    def _grow(self) -> None:
        good_steps = self.iteration - self.last_overflow - 1
        if good_steps > 0 and good_steps % self.window == 0:
            self.patience = self.hysteresis
            self.scale *= 2

    def _back_off(self) -> None:
        if self.patience > 1:
            self.patience -= 1
        elif self.scale <= self.minimum:
            raise TrainingError(
                f"fp16 gradients overflow at the smallest loss scale ({self.scale:g})",
                "lower the learning rate, or use --precision bf16",
            )
        else:
            self.scale = max(self.scale / 2, self.minimum)
        self.last_overflow = self.iteration


def make_loss_scaler(settings: CoreSettings) -> LossScaler:
    """Return the scaler that the settings describe; its scale is 1 outside fp16."""
    if settings.precision != "fp16":
        return LossScaler()
    if settings.loss_scale:
        return LossScaler(scale=settings.loss_scale)
    return LossScaler(
        scale=2.0**settings.initial_scale_power,
        dynamic=True,
        window=settings.loss_scale_window,
        minimum=settings.min_loss_scale,
        hysteresis=settings.hysteresis,
        patience=settings.hysteresis,
    )
