"""What PyTorch-native training saves: nested state dicts, whole or sharded over ranks.

    found       what a format hands over: that tree, and where it lies
    tree        one nested value from all ranks' files, every tensor a list of chunks
    sharded     ShardedTensor and DTensor, as ``torch.save`` pickles them; mesh: their mesh
    flat        FSDP 1 and FairScale flat parameters
    order       names for optimizers that number their parameters
    forms       how an optimizer's tensors are stored: whole, in runs, in flat units
    optimizer   every keying of an optimizer's state dict; nested: tensors in a parameter's state
    optimizers  which of several are the model's
    parts       which part of the tree is the model, an optimizer, a scheduler ...
    assemble    the parts as a manifest

    written     state dicts as PyTorch would save them
    distributed
                ShardedTensor and DTensor in them
    target      files of them: a file a rank, or whole
    flat_target
                the files of FSDP 1's ranks; flat_units: its flat parameters, flat_optimizers: the
                raw optimizer of each rank

``dcp`` and ``pytorch`` beside this package find the files and hand over trees.
"""
