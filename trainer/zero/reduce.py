"""Gradients of one micro batch a rank, added to the sums of their owners.

Canonical: a sum over micro batches 0, 1, 2, ... of the step, in that order, whatever the number of
ranks. Rank r's k-th micro batch is number k x world + r, so each call adds one micro batch of every
rank, in rank order, to what the earlier calls left. It moves the same bytes as a reduce-scatter;
only the additions happen at the owner instead of on the way.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import TrainingError
from trainer.ranks import Ranks
from trainer.timer import Timer
from trainer.zero.partition import Partition, Run

Gradients = Sequence[tuple[str, Tensor]]


class Reducer:
    """This rank's sums of gradients.

    Attributes:
        sums: one flat tensor for each of ``partition.flats``, in the dtype of the sums.
    """

    def __init__(
        self,
        partition: Partition,
        ranks: Ranks,
        dtype: torch.dtype,
        timer: Timer,
        *,
        canonical: bool,
    ) -> None:
        self.partition = partition
        self.sums = [
            torch.zeros(flat.numel, dtype=dtype, device=ranks.device) for flat in partition.flats
        ]
        self._ranks = ranks
        self._timer = timer
        self._collective = self._exchange if canonical else self._reduce

    def add(self, gradients: Gradients) -> None:
        """Add this rank's micro batch gradients, full tensors by name; all ranks name the same.

        Raises:
            TrainingError: ranks name other gradients.
        """
        if not gradients:
            return
        with self._timer("reduce"), torch.no_grad():
            self._agree([name for name, _ in gradients])
            by_owner: list[list[Run]] = [[] for _ in range(self._ranks.world)]
            flattened = {name: gradient.reshape(-1) for name, gradient in gradients}
            for name in flattened:
                for run in self.partition.runs[name]:
                    by_owner[run.rank].append(run)
            rows = [
                [flattened[run.name][run.start : run.stop] for run in runs] for runs in by_owner
            ]
            mine = by_owner[self._ranks.rank]
            for received in self._collective(rows):
                self._add_row(mine, received)

    def clear(self) -> None:
        """Forget the sums."""
        for total in self.sums:
            total.zero_()

    def _agree(self, names: list[str]) -> None:
        """Let no rank add one parameter's gradients to another's.

        Raises:
            TrainingError: the ranks have not used the same layers in the same order.
        """
        digest = torch.tensor([zlib.crc32("\n".join(names).encode())], device=self._ranks.device)
        every = digest.new_empty(self._ranks.world)
        self._ranks.all_gather(every, digest)
        if bool((every != digest).any()):
            raise TrainingError(
                f"the ranks' backward passes differ; here came {names[0]} and "
                f"{len(names) - 1} more",
                "every rank must use the same layers in the same order: switch off what skips "
                "layers at random or by their input (layerdrop), or train on one rank",
                one_rank=True,
            )

    def _add_row(self, runs: list[Run], row: Tensor) -> None:
        begin = 0
        for run in runs:
            piece = row[begin : begin + run.numel]
            self.sums[run.flat][run.offset : run.offset + run.numel].add_(piece)
            begin += run.numel

    def _exchange(self, rows: list[list[Tensor]]) -> Sequence[Tensor]:
        """What every rank has for this one, in rank order."""
        world, rank = self._ranks.world, self._ranks.rank
        sizes = [sum(piece.numel() for piece in row) for row in rows]
        sent = torch.cat([piece for row in rows for piece in row])
        if world == 1:
            return [sent]
        received = sent.new_empty(world * sizes[rank])
        dist.all_to_all_single(received, sent, [sizes[rank]] * world, sizes)
        return received.split(sizes[rank]) if sizes[rank] else []

    def _reduce(self, rows: list[list[Tensor]]) -> Sequence[Tensor]:
        """The collective's own sum over the ranks."""
        sums = []
        for owner, row in enumerate(rows):
            if row:
                total = torch.cat(row)
                dist.reduce(total, dst=owner)
                if owner == self._ranks.rank:
                    sums.append(total)
        return sums
