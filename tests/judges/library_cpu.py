"""Patches that let libraries which require GPUs run on CPUs. They do not change saved files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.judges.device import IS_GPU

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

STATE_DICT_TYPE = FullyShardedDataParallel.state_dict_type


def pass_for_gpus() -> None:
    """Make this rank look like one that accelerate runs FSDP on; on CPUs it silently gives DDP."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if IS_GPU:
        PartialState()
        return
    state = PartialState(cpu=True)
    if state.distributed_type is not DistributedType.MULTI_CPU:
        raise AssertionError(f"accelerate sees {state.distributed_type}")
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    state._shared_state["device"] = torch.device("cpu")  # FSDP 1 refuses it with an index
    offload_nothing()


def offload_nothing() -> None:
    """Turn off FSDP 1's CPU offload, which on a CPU frees or aliases what it saves."""
    FullyShardedDataParallel.state_dict_type = staticmethod(_in_place)


@contextmanager
def _in_place(
    module: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[Any]:
    configs = (state_dict_config, optim_state_dict_config)
    for each in configs:
        for name in ("offload_to_cpu", "rank0_only"):
            if hasattr(each, name):
                setattr(each, name, False)
    with STATE_DICT_TYPE(module, state_dict_type, *configs) as entered:
        yield entered


def wrap_on_cpu() -> None:
    """Pass the CPU as ``device_id`` to FSDP 1, which looks for a GPU if a library omits it."""
    if IS_GPU:
        return
    original = FullyShardedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["device_id"] = torch.device("cpu")
        original(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = init
    offload_nothing()
