"""Llama as Meta publishes it: ``consolidated.NN.pth``, a file a tensor-parallel rank, params.json.

    directory   which files they are
    reader      every rank's file as one manifest
    target      the files of other ranks

Sources: meta-llama/llama ``llama/model.py`` (ParallelEmbedding: the embedding is cut along dim 1),
meta-llama/llama3 ``llama/model.py`` (VocabParallelEmbedding: along dim 0); fairscale
``nn/model_parallel/layers.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.meta.directory import NAME, detect
from reshard.formats.place import Place
from reshard.manifest import Manifest

if TYPE_CHECKING:
    from reshard.model_parallel.rules import Table

__all__ = ["NAME", "detect", "read"]


def read(place: Place, table: Table | None = None) -> Manifest:
    """Every rank's file as one manifest.

    Raises:
        ReshardError: as `reader.read`.
    """
    from reshard.formats.meta import reader

    return reader.read(place, table)
