"""Lay out weights as safetensors: one file, or shards with their index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reshard.containers import safetensors
from reshard.containers.json_files import format_json
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, OutputFile, Skeleton

STEM = "model"  # of the names of transformers' files
INDEX = f"{STEM}.safetensors.index.json"
METADATA = {"format": "pt"}  # as transformers writes it: the framework is PyTorch


def lay_out(
    tensors: Sequence[tuple[Entry, DType]],
    *,
    max_shard_bytes: int,
    texts: Mapping[str, bytes],
    metadata: Mapping[str, str],
    stem: str = STEM,
) -> Skeleton:
    """Lay out shards with their index (none for a single shard), and the given small files.

    Args:
        tensors: entries in state-dict order, each with the dtype to write.
        texts: name -> content of the files beside the weights.
        stem: how the names of all files of weights begin.
    """
    shards = list(_divide(tensors, max_shard_bytes))
    files = [OutputFile.from_bytes(name, data) for name, data in sorted(texts.items())]
    entries: list[Entry] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}.safetensors"
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        laid_out = lay_out_file(name, shard, metadata)
        files += laid_out.files
        entries += laid_out.entries
        weight_map.update((entry.fqn, name) for entry, _ in shard)
    if len(shards) > 1:
        index = f"{stem}.safetensors.index.json"
        files.append(OutputFile.from_bytes(index, _build_index(weight_map, tensors)))
    return Skeleton(tuple(files), tuple(entries))


def lay_out_file(
    name: str, tensors: Sequence[tuple[Entry, DType]], metadata: Mapping[str, str]
) -> Skeleton:
    """Lay out one safetensors file."""
    header, placed, nbytes = safetensors.lay_out(name, tensors, metadata)
    return Skeleton((OutputFile(name, nbytes, ((0, header),)),), tuple(placed))


def _divide(
    tensors: Iterable[tuple[Entry, DType]], limit: int
) -> Iterable[list[tuple[Entry, DType]]]:
    # A tensor larger than the limit is a shard by itself, and does not end the open shard
    # (huggingface_hub 2.4 ``serialization/_base.py``, ``split_state_dict_into_shards_factory``).
    shard: list[tuple[Entry, DType]] = []
    size = 0
    for entry, dtype in tensors:
        nbytes = entry.numel * dtype.itemsize
        if nbytes > limit:
            yield [(entry, dtype)]
            continue
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((entry, dtype))
        size += nbytes
    if shard:
        yield shard


def _build_index(weight_map: Mapping[str, str], tensors: Sequence[tuple[Entry, DType]]) -> bytes:
    total = sum(entry.numel * dtype.itemsize for entry, dtype in tensors)
    parameters = sum(entry.numel for entry, _ in tensors)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return format_json(index)
