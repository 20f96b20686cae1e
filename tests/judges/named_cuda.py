"""Write on a CPU the files that a process on a GPU would write.

Its files differ in the names of devices: the location of each storage, every ``torch.device`` (of a
DTensor, and of each placement in a ShardedTensor) and the device type of a DeviceMesh. All of them
are renamed to the GPU of this rank; in a real ShardedTensor, each placement has its own rank's GPU.
A fused optimizer's settings are left to the caller: a fused AdamW runs on a CPU, too.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

_BEFORE_CPU = 0
"""A priority: torch asks its packages in ascending order, the CPU's is 10 (torch.serialization)."""


@contextlib.contextmanager
def named_cuda(rank: int) -> Iterator[None]:
    """Pickle tensors as if they were on ``cuda:<rank>``; read them back onto the CPU."""
    packages = torch.serialization._package_registry
    usual_packages, usual_reducers = list(packages), dict(copyreg.dispatch_table)
    torch.serialization.register_package(
        _BEFORE_CPU, lambda _storage: f"cuda:{rank}", lambda storage, _location: storage
    )
    copyreg.pickle(torch.device, lambda _device: (torch.device, ("cuda", rank)))
    copyreg.pickle(DeviceMesh, _mesh)  # type: ignore[arg-type]
    try:
        yield
    finally:
        packages[:] = usual_packages
        copyreg.dispatch_table.clear()
        copyreg.dispatch_table.update(usual_reducers)


def _mesh(mesh: DeviceMesh) -> tuple[Any, ...]:
    make, arguments, state, *_ = mesh.__reduce_ex__(2)  # type: ignore[misc]
    return make, arguments, {**state, "_device_type": "cuda"}
