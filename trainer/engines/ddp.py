"""ddp (ZeRO stage 0): every rank holds and updates everything."""

from __future__ import annotations

from torch import Tensor

from trainer.engines.replicated import FullGradientsEngine
from trainer.zero.partition import Partition, Shapes, contiguous


class DdpEngine(FullGradientsEngine):
    """An optimizer partition of one piece, the same on every rank; sums are gathered before use."""

    @property
    def _owner(self) -> int:
        return 0

    def _owned(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return contiguous(groups, shapes, 1)

    def _reduced(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return contiguous(groups, shapes, self.ranks.world)

    def _gradients(self) -> list[Tensor]:
        wholes = []
        for flat, total in zip(self.shard.partition.flats, self.reducer.sums, strict=True):
            whole = total.new_empty(self.ranks.world * total.numel())
            self.ranks.all_gather(whole, total)
            # Padded to a multiple of 2 x world, of which the first part is this flat tensor.
            wholes.append(whole[: flat.numel])
        return wholes

    def _published(self) -> None:
        """Everyone has made the same update."""
