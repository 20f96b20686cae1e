"""The Hugging Face model directory: sharded weights with an index, and its JSON files.

    directory   which files are a model's
    reader      weights, through their index or without one
    companions  config, tokenizer and processor files
    writer      shards and their index

Sources: transformers 5 ``modeling_utils.py`` (file names, ``{"format": "pt"}``), huggingface_hub 1
``serialization/_base.py`` (greedy shards in state-dict order, ``metadata.total_size``).
"""

from __future__ import annotations

from reshard.formats.huggingface.directory import NAME, detect, index_of, is_whole_set
from reshard.formats.place import Place
from reshard.manifest import Manifest

__all__ = ["NAME", "detect", "index_of", "is_whole_set", "read"]


def read(place: Place) -> Manifest:
    """Read a directory through its index, a directory of one file, or one file.

    Raises:
        ReshardError: as `reader.read`.
    """
    from reshard.formats.huggingface import reader

    return reader.read(place)
