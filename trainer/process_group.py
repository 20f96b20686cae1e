"""Join the process group: gloo on CPU, nccl on GPU, each rank of a machine on its own GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainer.core.errors import SettingsError
from trainer.core.ranks import Ranks
from trainer.cores import avoid_preemption
from trainer.environment import read_launcher_world_size


@contextmanager
def join_process_group(device: str, timeout_s: int, threads: int) -> Iterator[Ranks]:
    """Join the other ranks for the duration of the block.

    Raises:
        SettingsError: ``device`` is cuda, and there is no GPU, or fewer than ranks.
    """
    torch.set_num_threads(threads)
    own_device = _choose_device(device)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if own_device.type == "cuda" else "gloo"
    if backend == "gloo":
        avoid_preemption()
    if read_launcher_world_size() is None:  # one rank: a store in memory needs no port
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), own_device)
    finally:
        _leave_process_group()


def _leave_process_group() -> None:
    """Destroy all groups, and their backends last.

    With torch 2.6, the destructor of a group holds the interpreter lock while it waits for the
    threads of gloo, and such a thread needs the lock to free the tensors of its last collective.
    The destructor of a backend does not hold it. torch 2.13 was not seen to wait forever.
    """
    groups = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - new_group's groups too
    backends = [
        group._get_backend(kind)  # noqa: SLF001 - no public function returns it
        for group in groups
        for kind in group._device_types  # noqa: SLF001
    ]
    dist.destroy_process_group()
    del backends


def _choose_device(setting: str) -> torch.device:
    available = torch.cuda.is_available()
    if setting == "cpu" or (setting == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise SettingsError("--device is cuda, and torch finds no GPU", "use --device cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise SettingsError(
            f"too few GPUs: expected one for each rank of this machine, found {count}",
            f"use --nproc {count} or --device cpu",
            one_rank=True,
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
