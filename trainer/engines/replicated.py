"""Stages 0, 1 and 2: every rank holds the whole model, as flat tensors."""

from __future__ import annotations

from torch import Tensor

from trainer.engines.zero import ZeroEngine
from trainer.ranks import Ranks
from trainer.settings import Settings
from trainer.tensors import storage_bytes
from trainer.zero.flat import FlatParameters
from trainer.zero.partition import Partition, Shapes, contiguous


class ReplicatedEngine(ZeroEngine):
    """Masters are published into flat parameters, which the ranks then gather from each other."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.flat = FlatParameters(
            self.shard.partition, self._owner, self.trainable, self.dtype, ranks.device
        )

    def _owned(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return contiguous(groups, shapes, self.ranks.world)

    def _publish(self, index: int, master: Tensor) -> None:
        self.flat.publish(index, master)

    def _published(self) -> None:
        self.flat.gather(self.ranks)


class FullGradientsEngine(ReplicatedEngine):
    """Gradients stay whole on every rank until the backward pass is over (stages 0 and 1).

    Canonical reduction adds every micro batch at its owner; fast reduction lets autograd add this
    rank's micro batches up (in the parameters' dtype) and reduces once, before the step.
    """

    _largest_gradients = 0

    def _after_backward(self, *, last: bool) -> None:
        gradients = [(name, p.grad) for name, p in self.trainable.items() if p.grad is not None]
        self._largest_gradients = storage_bytes(gradient for _, gradient in gradients)
        if self.settings.reduction == "canonical" or last:
            self.reducer.add(gradients)
            for parameter in self.trainable.values():
                parameter.grad = None

    def _gradient_bytes(self) -> int:
        return self._largest_gradients

    def _accumulator_bytes(self) -> int:
        return storage_bytes(self.reducer.sums)
