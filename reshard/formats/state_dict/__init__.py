"""What PyTorch-native training saves: nested state dicts, whole or sharded over ranks.

    tree        one nested value from all ranks' files, every tensor a list of chunks
    sharded     ShardedTensor and DTensor, as ``torch.save`` pickles them
    flat        FSDP 1 and FairScale flat parameters
    order       names for optimizers that number their parameters
    forms       how an optimizer's tensors are stored: whole, in runs, in flat units
    optimizer   every keying of an optimizer's state dict
    parts       which part of the tree is the model, an optimizer, a scheduler ...
    assemble    the parts as a manifest

``dcp`` and ``pytorch`` beside this package find the files and hand over trees.
"""
