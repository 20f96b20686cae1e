"""The Hugging Face model directory: sharded weights with an index, and its JSON files.

    format      the format as one object: detection and reading
    directory   the names of a model's files
    reader      weights, through their index or without one
    slices      files of tensor-parallel ranks, joined by the user's rules

Sources: transformers 5 ``modeling_utils.py`` (file names, ``{"format": "pt"}``), huggingface_hub 1
``serialization/_base.py`` (greedy shards in state-dict order, ``metadata.total_size``).
"""

from reshard.formats.huggingface.directory import (
    NAME,
    detect,
    find_index,
    is_shard,
    is_whole_set,
    suggest_parts,
)

__all__ = ["NAME", "detect", "find_index", "is_shard", "is_whole_set", "suggest_parts"]
