"""What a rank knows: its number, its device, and how to reach the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from trainer.environment import world_size_of_launcher
from trainer.errors import SettingsError, TrainerError, TrainingError

# Renamed in torch 2.13; the old name warns there.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Ranks:
    """This rank among ``world`` ranks. One process is the same code with a world of one."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Rank 0 speaks and writes for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everyone's ``value`` (picklable, small), in rank order."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def largest(self, value: int) -> int:
        """The largest ``value`` of all ranks."""
        held = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)

    def share(self, value: Any) -> Any:
        """Rank 0's ``value``."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_gather(self, whole: Tensor, piece: Tensor) -> None:
        """Fill ``whole`` (world x numel) with everyone's ``piece`` (numel), in rank order.

        ``piece`` may be this rank's own part of ``whole``.
        """
        if self.world > 1:
            _all_gather(whole, piece)
        elif whole.data_ptr() != piece.data_ptr():
            whole.copy_(piece)

    def wait(self) -> None:
        """Until all are here."""
        dist.barrier()

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Fail on every rank when something fails on one, instead of leaving the others waiting.

        Raises:
            TrainerError: what a rank raised; TrainingError for an OSError.
        """
        problem: TrainerError | None = None
        try:
            yield
        except OSError as error:
            problem = TrainingError(f"rank {self.rank} could not {doing}: {error}")
        except TrainerError as error:
            problem = error
        for each in self.gather(problem):
            if each is not None:
                raise each


@contextmanager
def process_group(device: str, timeout_s: int, threads: int) -> Iterator[Ranks]:
    """Join the other ranks: gloo on CPU, nccl on GPU.

    Raises:
        SettingsError: cuda was asked for and there is none, or too few for the ranks.
    """
    torch.set_num_threads(threads)
    where = _device(device)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if where.type == "cuda" else "gloo"
    if world_size_of_launcher() is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()


def _device(asked: str) -> torch.device:
    """The device of this rank, made the current one: each rank of a machine has its own GPU."""
    available = torch.cuda.is_available()
    if asked == "cpu" or (asked == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise SettingsError("device is cuda, and torch finds none", "use --device cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise SettingsError(
            f"too few GPUs: expected one for each rank of this machine, found {count}",
            f"use --nproc {count} or --device cpu",
            one_rank=True,
        )
    where = torch.device("cuda", place)
    torch.cuda.set_device(where)
    return where
