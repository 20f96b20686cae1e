"""Lay out a checkpoint that ColossalAI's Booster loads, at any parallelism: files are whole.

``modeling/`` and ``optimizer/`` with an index each, and ``lr_scheduler`` beside, as its examples
have it; weights alone lie in the directory itself. Every plugin finds a weight by its name in the
index and a state by its number, so the shards need not be those of pipeline stages.

Source: ColossalAI 0.5.0 ``checkpoint_io/utils.py`` (``StateDictSharder``,
``save_param_groups``), ``checkpoint_io/index_file.py``, ``checkpoint_io/general_checkpoint_io.py``,
``checkpoint_io/hybrid_parallel_checkpoint_io.py`` (``load_sharded_model``,
``load_sharded_optimizer``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.dtypes import DType
from reshard.formats import skeletons, torch_writer
from reshard.formats.state_dict import written
from reshard.formats.state_dict.target import Wholes
from reshard.formats.state_dict.written import Value
from reshard.formats.training import Training, setup_lost
from reshard.manifest import MASTER, Skeleton
from reshard.model import ModelShapes

RUNNING, SCHEDULER = "running_states.json", "lr_scheduler"
_GROUPS = "pytorch_optim_group.bin"
_SHARD_BYTES = 1 << 30  # its size_per_shard
_MEBI = 1 << 20  # in which an index counts


def lay_out(
    state: Training, *, weights_only: bool, model: ModelShapes | None, dtype: DType | None
) -> Skeleton:
    """The directory.

    Raises:
        IncompleteError: the source lacks an optimizer, or what numbers its parameters.
        UnsupportedError: it is none of torch's.
    """
    above = "" if weights_only else "modeling/"
    parts = [*_sharded(f"{above}pytorch_model", written.weights(state, dtype=dtype), {})]
    if not weights_only:
        optimizer = written.optimizer(state, "index", model)
        about = {"param_groups": _GROUPS}
        parts += _sharded("optimizer/pytorch_optim", optimizer["state"], about)
        groups = optimizer["param_groups"]
        parts.append(torch_writer.lay_out_object(f"optimizer/{_GROUPS}", groups))
        parts += _beside(state)
    return skeletons.joined(parts)


def notes(state: Training, *, weights_only: bool) -> Iterator[str]:
    """What ColossalAI has no place for, and what it makes anew."""
    train = state.manifest.train
    if weights_only:
        return
    if any(state.manifest.of_kind(MASTER)):
        yield (
            "ColossalAI has no place for fp32 masters: weights are written from them, and it makes"
            " its own of the working copies when it loads"
        )
    for name in written.dropped(train, ("scheduler", RUNNING)):
        yield f"not carried: {name}"
    yield from setup_lost(state)
    if RUNNING not in train.client:
        yield f"no {RUNNING} (epoch, step, sample), which the examples of ColossalAI read"


def _beside(state: Training) -> Iterator[Skeleton]:
    """The scheduler, and where in the data the run was, as far as the source says."""
    train = state.manifest.train
    if train.scheduler is not None and written.is_faithful(train.scheduler):
        yield torch_writer.lay_out_object(SCHEDULER, train.scheduler)
    running = train.client.get(RUNNING)
    if running is not None:
        yield skeletons.of_bytes(RUNNING, json.dumps(running).encode())


def _sharded(name: str, held: Mapping[Any, Any], about: Mapping[str, str]) -> Iterator[Skeleton]:
    """Shards of a state dict, and their index.

    Args:
        name: of the files, below the destination.
        about: what the index says beside the size of all.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for number, (shard, nbytes) in enumerate(_shards(held.items()), 1):
        file = f"{name}-{number:05d}.bin"
        yield torch_writer.lay_out_object(file, shard, slot_of=Wholes())
        weight_map.update((str(key), file.rpartition("/")[2]) for key in shard)
        total += nbytes
    index = {"metadata": {**about, "total_size": total / _MEBI}, "weight_map": weight_map}
    yield skeletons.of_bytes(f"{name}.bin.index.json", json.dumps(index, indent=2).encode())


def _shards(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[dict[Any, Any], int]]:
    """Items in order, as many as a shard takes; the names of one tensor stay together."""
    shard: dict[Any, Any] = {}
    size = 0
    for together in _aliased(items):
        nbytes = _nbytes(next(iter(together.values())))
        if shard and size + nbytes > _SHARD_BYTES:
            yield shard, size
            shard, size = {}, 0
        shard |= together
        size += nbytes
    if shard:
        yield shard, size


def _aliased(items: Iterable[tuple[Any, Any]]) -> Iterable[dict[Any, Any]]:
    """Each value with all its keys."""
    found: dict[int, dict[Any, Any]] = {}
    for key, value in items:
        found.setdefault(id(value), {})[key] = value
    return found.values()


def _nbytes(value: Any) -> int:
    """Of a tensor, or of all in a parameter's state."""
    if isinstance(value, Value):
        return value.numel * value.dtype.itemsize
    return sum(map(_nbytes, value.values())) if isinstance(value, Mapping) else 0
