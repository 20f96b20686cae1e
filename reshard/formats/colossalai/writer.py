"""Lay out a checkpoint that ColossalAI's Booster loads, at any parallelism: files are whole.

It has ``modeling/`` and ``optimizer/`` with an index each, and ``lr_scheduler`` beside them, as in
ColossalAI's examples; weights without an optimizer are in the directory itself. Every plugin finds
a weight by its name in the index and a state by its number, so the shards need not be those of
pipeline stages.

Source: ColossalAI 0.5.0 ``checkpoint_io/utils.py`` (``StateDictSharder``,
``save_param_groups``), ``checkpoint_io/index_file.py``, ``checkpoint_io/general_checkpoint_io.py``,
``checkpoint_io/hybrid_parallel_checkpoint_io.py`` (``load_sharded_model``,
``load_sharded_optimizer``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.core.manifest import MASTER, Skeleton
from reshard.formats.colossalai.directory import RUNNING, SCHEDULER
from reshard.formats.request import Request
from reshard.state_dict import torch_state_dict
from reshard.state_dict.slots import WholeSlots
from reshard.state_dict.torch_state_dict import StateTensor
from reshard.training.state import WritableState, describe_lost_setup

_GROUPS = "pytorch_optim_group.bin"
_SHARD_BYTES = 1 << 30  # ColossalAI's size_per_shard
_MEBI = 1 << 20  # unit of the sizes in an index


def lay_out(state: WritableState, request: Request) -> Skeleton:
    """Lay out the directory."""
    above = "" if request.weights_only else "modeling/"
    weights = torch_state_dict.build_weights(state, dtype=request.dtype)
    parts = [*_lay_out_shards(f"{above}pytorch_model", weights, {})]
    if not request.weights_only:
        optimizer = torch_state_dict.build_optimizer(state, "index", request.model)
        about = {"param_groups": _GROUPS}
        parts += _lay_out_shards("optimizer/pytorch_optim", optimizer["state"], about)
        groups = optimizer["param_groups"]
        parts.append(
            torch_writer.lay_out_object(f"optimizer/{_GROUPS}", groups, slot_of=WholeSlots())
        )
        parts += _lay_out_companions(state)
    return skeletons.join(parts)


def describe_values(state: WritableState, *, weights_only: bool) -> Iterator[str]:
    """Yield what ColossalAI cannot store, and what it creates when it loads."""
    train = state.manifest.train
    if weights_only:
        return
    if any(state.manifest.of_kind(MASTER)):
        yield (
            "ColossalAI does not store fp32 masters: weights are written from them, and it creates"
            " new masters from the working copies when it loads"
        )
    for name in torch_state_dict.list_dropped(train, ("scheduler", RUNNING)):
        yield f"not copied: {name}"
    yield from describe_lost_setup(state)
    if RUNNING not in train.client:
        yield f"no {RUNNING} (epoch, step, sample), which the examples of ColossalAI read"


def _lay_out_companions(state: WritableState) -> Iterator[Skeleton]:
    """Yield the scheduler, and the position in the data, if the source has them."""
    train = state.manifest.train
    if train.scheduler is not None and torch_state_dict.is_restorable(train.scheduler):
        yield torch_writer.lay_out_object(SCHEDULER, train.scheduler)
    running = train.client.get(RUNNING)
    if running is not None:
        yield skeletons.lay_out_bytes(RUNNING, json.dumps(running).encode())


def _lay_out_shards(
    name: str, content: Mapping[Any, Any], about: Mapping[str, str]
) -> Iterator[Skeleton]:
    """Yield the shards of a state dict, and their index with ``about`` beside the total size."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, (shard, nbytes) in enumerate(_split_into_shards(content.items()), 1):
        file = f"{name}-{number:05d}.bin"
        yield torch_writer.lay_out_object(file, shard, slot_of=WholeSlots())
        weight_map.update((str(key), file.rpartition("/")[2]) for key in shard)
        total += nbytes
    index = {"metadata": {**about, "total_size": total / _MEBI}, "weight_map": weight_map}
    yield skeletons.lay_out_bytes(f"{name}.bin.index.json", json.dumps(index, indent=2).encode())


def _split_into_shards(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[dict[Any, Any], int]]:
    """Yield the items in order, up to a shard's size; the names of one tensor stay together."""
    shard: dict[Any, Any] = {}
    size = 0
    # Names share a storage only inside one file; apart, a tied tensor would be stored twice.
    for together in _group_aliases(items):
        nbytes = _count_bytes(next(iter(together.values())))
        if shard and size + nbytes > _SHARD_BYTES:
            yield shard, size
            shard, size = {}, 0
        shard |= together
        size += nbytes
    if shard:
        yield shard, size


def _group_aliases(items: Iterable[tuple[Any, Any]]) -> Iterable[dict[Any, Any]]:
    by_value: dict[int, dict[Any, Any]] = {}
    for key, value in items:
        by_value.setdefault(id(value), {})[key] = value
    return by_value.values()


def _count_bytes(value: Any) -> int:
    if isinstance(value, StateTensor):
        return value.numel * value.dtype.itemsize
    return sum(map(_count_bytes, value.values())) if isinstance(value, Mapping) else 0
