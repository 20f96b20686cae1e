"""Read HuggingFaceStorageWriter's files before consolidation: blocks in safetensors files.

There is no ``.metadata``. Each file's header states where its tensors' blocks begin; no file states
the size of a tensor. It is taken to end with its last blocks, and the proof of coverage finds a
hole inside.

Source: torch 2.13 ``distributed/checkpoint/hf_storage.py``, ``_hf_utils.py``
(``_gen_file_name``, ``DCP_SHARDING_INFO``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.containers import safetensors
from reshard.core.box import Box, as_index
from reshard.core.chunks import Chunk
from reshard.core.location import Location, list_missing_ranks
from reshard.core.manifest import Entry, SourceFile
from reshard.errors import FETCH_MISSING, CorruptError, IncompleteError
from reshard.formats.dcp.directory import HF_SHARD, is_hf_shard
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import ParsedTree
from reshard.system.threads import map_files

_INFO = "DCP_SHARDING_INFO"


def read(location: Location) -> ParsedTree:
    """Read the weights of all shards in a directory.

    Raises:
        IncompleteError: a rank's shard is missing.
        CorruptError: a header does not state where its blocks begin.
    """
    shards = {name: path for name, path in location.files.items() if is_hf_shard(name)}
    ranks = {int(HF_SHARD.fullmatch(name)[1]) for name in shards}  # type: ignore[index]
    # The ranks in these names count from 1 (``_gen_file_name``).
    missing = list_missing_ranks({rank - 1 for rank in ranks}, range(max(ranks)))
    if missing:
        raise IncompleteError(
            location,
            f"contains the shard of rank {max(ranks) - 1}, but none of rank {missing[0]}",
            FETCH_MISSING,
        )
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    sources: dict[str, SourceFile] = {}
    seen: dict[frozenset[tuple[str, tuple[int, ...]]], Path] = {}  # blocks of a shard -> its file
    read = map_files(shards.values(), safetensors.read)
    for path, file in zip(shards.values(), read, strict=True):
        sources[file.source.path] = file.source
        origins = _parse_origins(path, file.metadata)
        for fqn, chunk in file.tensors.items():
            if fqn not in origins or len(origins[fqn]) != len(chunk.box.shape):
                raise CorruptError(path, f"does not state where its block of {fqn!r} starts")
            chunks[fqn].append(replace(chunk, box=Box(origins[fqn], chunk.box.shape)))
        other = seen.setdefault(frozenset((fqn, origins[fqn]) for fqn in file.tensors), path)
        if file.tensors and other != path:
            raise CorruptError(
                path,
                f"contains the same blocks as {other.name}, but DCP writes each block once",
                "one file is a copy of the other: fetch both again from their ranks",
            )
    state = {fqn: _join_blocks(fqn, blocks) for fqn, blocks in chunks.items()}
    return ParsedTree(
        state, str(location), sources, world=len(ranks), plain_is_buffer=False, proved=False
    )


def _join_blocks(fqn: str, chunks: list[Chunk]) -> GlobalTensor:
    first = chunks[0]
    for chunk in chunks:
        if (chunk.dtype, len(chunk.box.shape)) != (first.dtype, len(first.box.shape)):
            raise CorruptError(
                chunk.file, f"{fqn!r} has another dtype or number of dims than in {first.file}"
            )
    ends = [[o + n for o, n in zip(c.box.origin, c.box.shape, strict=True)] for c in chunks]
    shape = tuple(max(extent) for extent in zip(*ends, strict=True))
    return GlobalTensor(chunks[0].dtype, shape, tuple(chunks))


def describe_whole(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the strings for the header of a file of whole tensors."""
    info = {entry.fqn: {"saved_offsets": [0] * len(entry.shape)} for entry in entries}
    return {_INFO: json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}


def _parse_origins(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    try:
        info: dict[str, Any] = json.loads(metadata[_INFO])
        return {fqn: as_index(item["saved_offsets"]) for fqn, item in info.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(path, f"has no readable {_INFO} in its header") from error
