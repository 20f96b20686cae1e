"""Pickled shards: read without running code, and only into a state with the same sharding."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from trainer.checkpoint import files
from trainer.core.errors import CheckpointError, LayoutError

State = dict[str, Any]


def _nested_class(holder: object, name: str) -> object:
    """Resolve the only ``getattr`` that a pickled ShardedTensor contains."""
    if holder is not ShardedTensor or name != "ProcessGroupState":
        raise pickle.UnpicklingError(f"getattr of {name!r}")
    return ShardedTensor.ProcessGroupState


_SHARDED_TENSOR: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    ShardedTensor,
    ShardedTensor.ProcessGroupState,
    ShardedTensorMetadata,
    ShardMetadata,
    Shard,
    TensorProperties,
    MEM_FORMAT_ENCODING,
    ChunkShardingSpec,
    _remote_device,
    (_nested_class, "builtins.getattr"),
]


def load(path: Path, *keys: str) -> State:
    """Load tensors, ShardedTensors and DTensors in plain containers.

    Args:
        path: the file.
        keys: keys that the dictionary in the file must have.

    Raises:
        CheckpointError: the file is missing or damaged, or names other classes.
    """
    with torch.serialization.safe_globals(_SHARDED_TENSOR):
        state: State = files.load(path)
    files.check_keys(state, path, *keys)
    return state


def list_names(state: State) -> list[str]:
    """Return the names of a model's tensors, or of the parameters with optimizer state."""
    return [*state.get("state", state)]


def select_own(live: State, saved: State, all_names: set[str]) -> State:
    """Return ``saved`` without what only other ranks have; what no rank has stays in it.

    Args:
        live: this rank's state.
        saved: whole tensors of all ranks.
        all_names: the names of all ranks.
    """
    others = all_names.difference(list_names(live))
    if "param_groups" not in live:
        return {name: value for name, value in saved.items() if name not in others}
    return {
        "state": {name: value for name, value in saved["state"].items() if name not in others},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name not in others]}
            for group in saved["param_groups"]
        ],
    }


def check(live: State, saved: State, path: Path, *, whole: bool = False) -> None:
    """Compare names, shapes and sharding.

    Args:
        live: this rank's state.
        saved: what the file has.
        path: the file.
        whole: the saved tensors are not sharded.

    Raises:
        CheckpointError: they differ; LayoutError if the tensors may only be cut in another way.
    """
    own, stored = dict(_iterate_tensors(live)), dict(_iterate_tensors(saved))
    for name in dict.fromkeys((*own, *stored)):
        expected, found = (_describe(each.get(name), whole=whole) for each in (own, stored))
        if expected != found:
            raise (CheckpointError if whole else LayoutError)(
                f"{path}: {name} is {found}, and this run has {expected}",
                "resume with the model of the run that saved it",
            )
    check_groups(live, saved.get("param_groups", []), path)


def check_groups(live: State, saved: list[State], path: Path) -> None:
    """Check that each param group has the parameters that it had in the checkpoint.

    Raises:
        LayoutError: the groups differ.
    """
    own = [set(group["params"]) for group in live.get("param_groups", [])]
    stored = [set(group["params"]) for group in saved]
    if len(own) != len(stored) or not all(map(set.issubset, own, stored)):
        raise LayoutError(
            f"{path} has param groups of {[len(group) for group in stored]} parameters, and this "
            f"run has groups of {[len(group) for group in own]}",
            "resume with the --param-groups and --freeze of the run that saved it",
        )


def fill(live: State, saved: State, *, whole: bool = False) -> None:
    """Copy saved values into this rank's shards, and the hyper-parameters, after ``check``.

    Args:
        live: this rank's state.
        saved: what the file has.
        whole: the saved tensors are not sharded.
    """
    stored = dict(_iterate_tensors(saved))
    with torch.no_grad():
        for name, tensor in _iterate_tensors(live):
            shards = [cut_like(stored[name], tensor)] if whole else _get_shards(stored[name])
            for own, shard in zip(_get_shards(tensor), shards, strict=True):
                own.copy_(shard)
    for group, other in zip(
        live.get("param_groups", []), saved.get("param_groups", []), strict=True
    ):
        group.update(other)


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of ``whole`` if it is sharded like ``like``, along one mesh axis."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Cut):  # the other axis of a hybrid mesh has replicas
            chunks = whole.chunk(mesh.size(axis), placement.dim)
            index = mesh.get_local_rank(axis)
            return chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def _iterate_tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, by dotted name."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _iterate_tensors(value, f"{prefix}{key}.")


def _describe(tensor: Tensor | None, *, whole: bool) -> str:
    if tensor is None:
        return "absent"
    shape = str(tuple(tensor.size()))
    if whole:
        return shape
    if isinstance(tensor, DTensor):
        return f"{shape} cut by {tensor.placements} over ranks {tensor.device_mesh.mesh.tolist()}"
    if isinstance(tensor, ShardedTensor):
        pieces = [shard.shard_sizes for shard in tensor.metadata().shards_metadata]
        return f"{shape} cut into {pieces}"
    return shape


def _get_shards(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]
