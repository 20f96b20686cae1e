"""Pickled shards: read without running their code, and only into a state of the same form."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

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
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut

from trainer.checkpoint import files
from trainer.errors import CheckpointError

State = dict[str, Any]


def _nested_class(holder: object, name: str) -> object:
    """The one use that a pickled ShardedTensor makes of ``getattr``."""
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


def load(path: Path) -> State:
    """Tensors, ShardedTensors and DTensors in plain containers.

    Raises:
        CheckpointError: the file is missing, damaged, or asks for other classes.
    """
    with torch.serialization.safe_globals(_SHARDED_TENSOR):
        state: State = files.load(path)
    return state


def names(state: State) -> list[str]:
    """Of a model's parameters, or those that an optimizer has state for."""
    return [*state.get("state", state)]


def part(live: State, saved: State, everywhere: set[str]) -> State:
    """``saved`` without what only other ranks have; what no rank has stays, to be found.

    Args:
        everywhere: the names of all ranks.
    """
    others = everywhere.difference(names(live))
    if "param_groups" not in live:
        return {name: value for name, value in saved.items() if name not in others}
    return {
        "state": {name: value for name, value in saved["state"].items() if name not in others},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name not in others]}
            for group in saved["param_groups"]
        ],
    }


def check(live: State, saved: State, path: Path, remedy: str, *, whole: bool = False) -> None:
    """Compare names, shapes and cuts.

    Args:
        whole: what is saved is not cut.

    Raises:
        CheckpointError: they differ.
    """
    mine, theirs = dict(_tensors(live)), dict(_tensors(saved))
    for name in dict.fromkeys((*mine, *theirs)):
        expected, found = (_form(each.get(name), whole=whole) for each in (mine, theirs))
        if expected != found:
            raise CheckpointError(f"{path}: {name} is {found}, this run has {expected}", remedy)
    check_groups(live, saved.get("param_groups", []), path)


def check_groups(live: State, saved: list[State], path: Path) -> None:
    """The optimizer's groups must hold the parameters that they held.

    Raises:
        CheckpointError: they do not.
    """
    mine = [set(group["params"]) for group in live.get("param_groups", [])]
    theirs = [set(group["params"]) for group in saved]
    if len(mine) != len(theirs) or not all(map(set.issubset, mine, theirs)):
        raise CheckpointError(
            f"{path}: param groups of {[len(group) for group in theirs]} parameters, this run has "
            f"groups of {[len(group) for group in mine]}",
            "resume with the run's own --param-groups and --freeze",
        )


def fill(live: State, saved: State, *, whole: bool = False) -> None:
    """Copy this rank's shards and the hyper-parameters, which ``check`` has compared.

    Args:
        whole: what is saved is not cut.
    """
    theirs = dict(_tensors(saved))
    with torch.no_grad():
        for name, tensor in _tensors(live):
            saved_shards = [piece(theirs[name], tensor)] if whole else _shards(theirs[name])
            for mine, shard in zip(_shards(tensor), saved_shards, strict=True):
                mine.copy_(shard)
    for group, other in zip(
        live.get("param_groups", []), saved.get("param_groups", []), strict=True
    ):
        group.update(other)


def piece(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank has of ``whole`` when it is cut as ``like`` is.

    The last axis of the mesh cuts first: ``fully_shard`` cuts what tensor parallelism has left, and
    calls that _StridedShard.
    """
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = cast("Cut", placement).dim
        chunks = whole.chunk(mesh.size(axis), dim)
        place = mesh.get_local_rank(axis)
        whole = chunks[place] if place < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def _tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dictionaries, by dotted name."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{prefix}{key}.")


def _form(tensor: Tensor | None, *, whole: bool) -> str:
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


def _shards(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]
