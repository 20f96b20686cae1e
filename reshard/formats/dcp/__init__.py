"""Directories of ``torch.distributed.checkpoint`` (DCP).

    directory   which files are DCP's
    metadata    ``.metadata``: which tensors there are, and where each block is stored
    archives    single-tensor ``torch.save`` archives, those of equal form parsed once
    items       what lies there: a ``torch.save`` archive or a safetensors stream a block
    reader      both made one tree
    flattened   flat ranges that Megatron-core saved, in their own shape again
    writer      a ``.metadata`` and its shards
    hf_shards   what HuggingFaceStorageWriter leaves before consolidation: no ``.metadata`` at all

Sources: torch 2.13 ``distributed/checkpoint/{metadata,filesystem,default_planner,hf_storage}.py``.
"""
