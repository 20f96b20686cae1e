"""ddp (ZeRO stage 0): every rank holds and updates everything.

::

                 parameters   gradients   master, moments
    rank 0       [========]   [========]  [========]
    rank 1       [========]   [========]  [========]

Each rank sums a piece of the gradients, the ranks gather the sums, and all make the same update.
"""

from __future__ import annotations

from torch import Tensor

from trainer.core.partition import Partition, Shapes, partition_groups
from trainer.core.replicated import FullGradientsEngine


class DdpEngine(FullGradientsEngine):
    """Partitions the optimizer into one piece, which every rank holds."""

    @property
    def _optimizer_rank(self) -> int:
        return 0

    def _partition_optimizer(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return partition_groups(groups, shapes, 1)

    def _partition_gradients(self, groups: list[tuple[str, ...]], shapes: Shapes) -> Partition:
        return partition_groups(groups, shapes, self.ranks.world)

    def _collect_gradients(self) -> list[Tensor]:
        wholes = []
        for flat, piece in zip(self.shard.partition.flats, self.reducer.sums, strict=True):
            whole = piece.new_empty(self.ranks.world * piece.numel())
            self.ranks.all_gather(whole, piece)
            # The gathered sums are padded to a multiple of 2 x world, this flat tensor to one of 2.
            wholes.append(whole[: flat.piece_numel])
        return wholes

    def _exchange_parameters(self) -> None:
        """Do nothing: every rank has made the same update."""
