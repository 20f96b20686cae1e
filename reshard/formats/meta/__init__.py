"""Llama as Meta publishes it: ``consolidated.NN.pth`` per tensor-parallel rank, and params.json.

    directory   the names of the files
    reader      every rank's file as one manifest
    target      the files of other ranks

Sources: meta-llama/llama ``llama/model.py`` (ParallelEmbedding: the embedding is cut along dim 1),
meta-llama/llama3 ``llama/model.py`` (VocabParallelEmbedding: along dim 0); fairscale
``nn/model_parallel/layers.py``.
"""

from reshard.formats.meta.directory import NAME, detect

__all__ = ["NAME", "detect"]
