"""Read the items that torch_checkpointing saves as safetensors, a file for each rank.

    metadata.pkl          the files of each item, and how ranks cut its DTensors
    model_0.safetensors   the tensors that rank 0 holds

Items that it saves with torch.save have DTensors, which state their cuts themselves.

Source: torch_checkpointing 0.1.1 ``distributed_metadata.py`` (``DistributedMetadata.to_dict``),
``dtensor_metadata.py`` (``DTensorShardingMetadata.to_dict``), ``checkpoint_layout.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from reshard.containers import safetensors
from reshard.containers.pickles.unpickle import loads
from reshard.core.box import Box, as_index
from reshard.core.chunks import Chunk
from reshard.core.location import Location
from reshard.core.manifest import SourceFile
from reshard.errors import ALTERED, FETCH_MISSING, CorruptError, IncompleteError, UnsupportedError
from reshard.formats.pytorch.directory import SLICES, states_slices
from reshard.layouts.mesh import MeshGrid
from reshard.layouts.partition import Cut, compute_mesh_box
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import ParsedTree, join_trees
from reshard.system.files import read_small_file
from reshard.system.threads import map_files_by_key

_SAFETENSORS = "SafetensorsSerialization"
_MAX_BYTES = 1 << 30


def read_items(location: Location) -> dict[str, ParsedTree]:
    """Return the items that are stored as safetensors, by name; none of other programs.

    Raises:
        CorruptError: the metadata has another structure, or contradicts a file.
        IncompleteError: a rank's file is missing.
        UnsupportedError: the shards of a tensor are not blocks of it.
    """
    if not states_slices(location):
        return {}
    path = location.files[SLICES]
    root = loads(read_small_file(path, _MAX_BYTES), where=path).value
    if not isinstance(root, dict) or not root.keys() >= {"metadata", "world_size"}:
        return {}  # of another program
    try:
        return {
            name: _read_item(location, files, item["nested_path_to_metadata"])
            for name, item in root["metadata"].items()
            if (files := _find_files(location, item))
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            path, f"is not metadata of torch_checkpointing ({type(error).__name__})", ALTERED
        ) from error


def _find_files(location: Location, item: Mapping[str, Any]) -> dict[int, Path]:
    files = {}
    for rank, layout in item["rank_to_layout_info"].items():
        if layout is None or layout["serialization_format"]["type"] != _SAFETENSORS:
            continue
        name = layout["file_path"]
        if name not in location.files:
            raise IncompleteError(location, f"{name} is missing", FETCH_MISSING)
        files[rank] = location.files[name]
    return dict(sorted(files.items()))


def _read_item(
    location: Location, files: Mapping[int, Path], stated: Mapping[str, Any]
) -> ParsedTree:
    cuts = {
        (".".join(map(str, json.loads(path))), rank): group["sharding_metadata"]["data"]
        for path, groups in stated.items()
        for group in groups
        for rank in group["ranks"]
    }
    metadata = location.files[SLICES]
    sources = {str(metadata): SourceFile(str(metadata), metadata.stat().st_size)}
    opened = map_files_by_key(files, safetensors.read)
    sources |= {file.source.path: file.source for file in opened.values()}
    trees = [
        {
            fqn: _place(chunk, fqn, cuts.get((fqn, rank)), rank)
            for fqn, chunk in file.tensors.items()
        }
        for rank, file in opened.items()
    ]
    root, _ = join_trees(trees, [file.source.path for file in opened.values()])
    # safetensors does not keep the order of the model
    return ParsedTree(root, str(location), sources, world=len(files), ordered=False)


def _place(chunk: Chunk, fqn: str, cut: Mapping[str, Any] | None, rank: int) -> GlobalTensor:
    if cut is None:
        return GlobalTensor(chunk.dtype, chunk.box.shape, (chunk,))
    box, shape = _find_box(str(chunk.file), fqn, cut, rank), as_index(cut["global_shape"])
    if box.shape != chunk.box.shape:
        raise CorruptError(
            str(chunk.file),
            f"has {fqn!r} in the shape {chunk.box.shape}; {SLICES} states {box.shape}",
            ALTERED,
        )
    held = (replace(chunk, box=box),) if box.volume or not prod(shape) else ()
    return GlobalTensor(chunk.dtype, shape, held)


def _find_box(path: str, fqn: str, cut: Mapping[str, Any], rank: int) -> Box:
    mesh = cut["mesh_spec"]
    sizes = as_index(mesh["mesh_shape"])
    coordinate = MeshGrid(sizes).locate(mesh["mesh_data"].index(rank))
    dims = [
        None
        if placement["type"] == "Replicate"
        else Cut(placement["dim"], placement.get("split_factor", 1))
        for placement in cut["placements"]
    ]
    box = compute_mesh_box(as_index(cut["global_shape"]), dims, sizes, coordinate)
    if box is None:
        raise UnsupportedError(
            path,
            f"has {fqn!r} in strided shards that are not blocks of the tensor",
            "save it with DCP, or gather it before saving",
        )
    return box
