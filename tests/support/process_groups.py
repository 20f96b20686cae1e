"""Process groups of torch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a process group whose operations do nothing."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
