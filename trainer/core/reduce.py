"""Gradients of one micro batch of each rank, added to the sums that their owners keep.

::

    rank 0   |ggg|ggg|ggg|     piece p of every rank's gradient travels to owner p,
    rank 1   |ggg|ggg|ggg|     which adds what arrives in rank order
    rank 2   |ggg|ggg|ggg|
               v   v   v
    owner      0   1   2

Canonical reduction is a sum over micro batches 0, 1, 2, ... of the step, in that order, for any
number of ranks: rank r's k-th micro batch is number k x world + r, so each call adds one micro
batch of every rank, in rank order, to the sums of the earlier calls. If the ranks do not divide the
micro batches, the last ranks have none in the last round, and what they send is not added. The call
moves the same bytes as a reduce-scatter; only the additions happen at the owner instead of on the
way. Fast reduction leaves the additions to the collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.errors import TrainingError
from trainer.core.partition import Partition, Run
from trainer.core.ranks import Ranks

Gradients = Sequence[tuple[str, Tensor]]


class Reducer:
    """Keeps this rank's sums of gradients.

    Attributes:
        sums: this rank's piece of each of ``partition.flats``, in the dtype of the sums.
    """

    def __init__(
        self,
        partition: Partition,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        canonical: bool,
    ) -> None:
        self.partition = partition
        self.sums = [
            torch.zeros(flat.piece_numel, dtype=dtype, device=ranks.device)
            for flat in partition.flats
        ]
        self._ranks = ranks
        self._send = self._exchange if canonical else self._reduce

    def add(self, gradients: Gradients, active_ranks: int) -> None:
        """Add the gradients of one micro batch of each rank to the sums of their owners.

        Args:
            gradients: (name, full tensor) of this rank; all ranks must give the same names.
            active_ranks: the number of ranks, counted from the first, whose gradients are added.
        """
        if not gradients:
            return
        with torch.no_grad():
            self._check_same_names([name for name, _ in gradients])
            by_owner: list[list[Run]] = [[] for _ in range(self._ranks.world)]
            flattened = {name: gradient.reshape(-1) for name, gradient in gradients}
            for name in flattened:
                for run in self.partition.runs[name]:
                    by_owner[run.rank].append(run)
            rows = [
                [flattened[run.name][run.start : run.stop] for run in runs] for runs in by_owner
            ]
            mine = by_owner[self._ranks.rank]
            for received in self._send(rows)[:active_ranks]:
                self._add_row(mine, received)

    def clear(self) -> None:
        """Set the sums to zero."""
        for total in self.sums:
            total.zero_()

    def _check_same_names(self, names: list[str]) -> None:
        """Raise TrainingError if ranks give gradients of different parameters."""
        digest = torch.tensor([zlib.crc32("\n".join(names).encode())], device=self._ranks.device)
        digests = digest.new_empty(self._ranks.world)
        self._ranks.all_gather(digests, digest)
        if bool((digests != digest).any()):
            raise TrainingError(
                "the backward passes of the ranks differ: this rank has gradients of "
                f"{names[0]} and {len(names) - 1} more parameters, another rank of others",
                "every rank must run the same layers in the same order: switch off what skips "
                "layers at random or by their input (layerdrop), or train on one rank",
                one_rank=True,
            )

    def _add_row(self, runs: list[Run], row: Tensor) -> None:
        """Add a row, which has the elements of ``runs`` end to end, to the sums."""
        begin = 0
        for run in runs:
            piece = row[begin : begin + run.numel]
            self.sums[run.flat][run.offset : run.offset + run.numel].add_(piece)
            begin += run.numel

    def _exchange(self, rows: list[list[Tensor]]) -> Sequence[Tensor]:
        """Send row r to rank r; return the row that each rank has sent to this one."""
        world, rank = self._ranks.world, self._ranks.rank
        sizes = [sum(piece.numel() for piece in row) for row in rows]
        sent = torch.cat([piece for row in rows for piece in row])
        if world == 1:
            return [sent]
        received = sent.new_empty(world * sizes[rank])
        dist.all_to_all_single(received, sent, [sizes[rank]] * world, sizes)
        return received.split(sizes[rank]) if sizes[rank] else []

    def _reduce(self, rows: list[list[Tensor]]) -> Sequence[Tensor]:
        """Return one row, the sum over all ranks in the collective's order; none if it is empty."""
        sums = []
        for owner, row in enumerate(rows):
            if row:
                total = torch.cat(row)
                dist.reduce(total, dst=owner)
                if owner == self._ranks.rank:
                    sums.append(total)
        return sums
