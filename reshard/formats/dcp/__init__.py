"""Directories of ``torch.distributed.checkpoint`` (DCP).

    directory   which files are DCP's
    metadata    ``.metadata``: which tensors there are, and where each block is stored
    archives    single-tensor ``torch.save`` archives, those of equal form parsed once
    items       the stored blocks: ``torch.save`` archives, or a safetensors stream
    reader      metadata and items as one tree
    flattened   tensors that Megatron-core saved as flat ranges, in their own shape
    writer      a ``.metadata`` and its shards
    saved_keys  the keys of a source, and its items that are copied as they are
    hf_shards   HuggingFaceStorageWriter's files before consolidation, without ``.metadata``

Sources: torch 2.13 ``distributed/checkpoint/{metadata,filesystem,default_planner,hf_storage}.py``.
"""
