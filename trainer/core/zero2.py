"""ZeRO stage 2: gradients are partitioned too.

::

                 parameters   gradients   master, moments
    rank 0       [========]   [====    ]  [====    ]
    rank 1       [========]   [    ====]  [    ====]

    backward     ... layer 2 | layer 1 | layer 0
    bucket       [ g g g g ] -> owners, freed        whenever reduce_bucket_size elements are there
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from trainer.core.ranks import Ranks
from trainer.core.replicated import ReplicatedEngine
from trainer.core.settings import CoreSettings


class Zero2Engine(ReplicatedEngine):
    """Reduces during the backward pass, so that all gradients never exist at the same time."""

    def __init__(self, settings: CoreSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self._bucket: list[tuple[str, Tensor]] = []
        self._bucket_numel = 0
        for name, parameter in self.trainable.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add_to_bucket, name))

    def _add_to_bucket(self, name: str, parameter: Tensor) -> None:
        """Take a gradient that autograd has finished; reduce the bucket when it is full."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self._bucket.append((name, gradient))
        self._bucket_numel += gradient.numel()
        if self._bucket_numel >= self.settings.reduce_bucket_size:
            self._reduce_bucket()

    def _reduce_bucket(self) -> None:
        self.reducer.add(self._bucket, self.active_ranks)
        self._bucket, self._bucket_numel = [], 0

    def _end_microbatch(self, *, last: bool) -> None:
        del last
        self._reduce_bucket()
