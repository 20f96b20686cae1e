"""This rank, and the collectives that join it to the others.

Training calls only ``all_gather``; `reduce` and `norm` have the collectives that add. What follows
it is for logs and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.errors import TrainerError, TrainingError

# torch 2.13 calls it all_gather_single, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Ranks:
    """This rank among ``world`` ranks. One process runs the same code with a world of one.

    Attributes:
        group: what the methods communicate in: None, torch's default group, or a group of a thread
            that saves, because collectives of two threads must not meet.
    """

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def all_gather(self, whole: Tensor, piece: Tensor) -> None:
        """Fill ``whole`` (world x numel) with the ``piece`` (numel) of every rank, in rank order.

        ``piece`` may be this rank's own part of ``whole``.
        """
        if self.world > 1:
            _all_gather(whole, piece, group=self.group)
        elif whole.data_ptr() != piece.data_ptr():
            whole.copy_(piece)

    # For logs and checkpoints

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank (picklable, small), in rank order."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce_max(self, value: int) -> int:
        """Return the largest ``value`` of all ranks."""
        largest = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def broadcast_object(self, value: Any) -> Any:
        """Return the ``value`` of rank 0."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device, group=self.group)
        return box[0]

    @contextmanager
    def raise_on_all(self, doing: str) -> Iterator[None]:
        """Raise on every rank what one rank raises, so that no rank waits for one that failed.

        Raises:
            TrainerError: the first rank's; TrainingError for an OSError.
        """
        problem: TrainerError | None = None
        try:
            yield
        except OSError as error:
            problem = TrainingError(
                f"rank {self.rank} could not {doing}: {error}",
                "check that the path can be written and that the disk has space, and resume",
            )
        except TrainerError as error:
            problem = error
        for each in self.all_gather_objects(problem):
            if each is not None:
                each.one_rank = False
                raise each
