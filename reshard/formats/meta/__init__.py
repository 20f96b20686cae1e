"""Llama as Meta publishes it: ``consolidated.NN.pth`` per tensor-parallel rank, and params.json.

    format      the format as one object: detection, reading and writing
    directory   the names of the files
    reader      every rank's file as one manifest
    writer      the files of other ranks

Sources: meta-llama/llama ``llama/model.py`` (ParallelEmbedding: the embedding is cut along dim 1),
meta-llama/llama3 ``llama/model.py`` (VocabParallelEmbedding: along dim 0); fairscale
``nn/model_parallel/layers.py``.
"""
