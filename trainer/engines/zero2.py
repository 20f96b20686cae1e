"""ZeRO stage 2: gradients are cut too; a bucket at a time goes to its owners and is freed."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from trainer.engines.replicated import ReplicatedEngine
from trainer.ranks import Ranks
from trainer.settings import Settings


class Zero2Engine(ReplicatedEngine):
    """Reduces while the backward pass goes on, so that whole gradients never exist together."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self._bucket: list[tuple[str, Tensor]] = []
        self._bucket_numel = 0
        for name, parameter in self.trainable.items():
            parameter.register_post_accumulate_grad_hook(partial(self._ready, name))

    def _ready(self, name: str, parameter: Tensor) -> None:
        """Take the gradient that autograd has finished."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self._bucket.append((name, gradient))
        self._bucket_numel += gradient.numel()
        if self._bucket_numel >= self.settings.reduce_bucket_size:
            self._flush()

    def _flush(self) -> None:
        self.reducer.add(self._bucket)
        self._bucket, self._bucket_numel = [], 0

    def _after_backward(self, *, last: bool) -> None:
        del last
        self._flush()
