"""State dicts of torch: those of all ranks read as one tree, and built again to be written.

Reading, shared by every format whose files hold nested state dicts:

    tree               one nested value from all ranks' files, every tensor a list of chunks
    global_tensor      a tensor of known global shape, whose chunks are in the files of ranks
    device_meshes      the mesh of a DTensor: its axes, and the order of the ranks along them
    sharded_reader     DTensor and ShardedTensor, as ``torch.save`` pickles them
    flat_params        flat parameters of FSDP 1
    shard_metadata     sharded parameters of FairScale and torch_xla
    sections           which part of the tree is the model, an optimizer, a scheduler ...
    optimizers         optimizer state dicts: their form, and the parameters they belong to
    memory_form        weights of PEFT's and transformers' files, as the trained model names them
    leaves             values of a model's state dict that are not tensors
    plain_values       values of a pickle as JSON
    own_values         a script's own values as a pickle describes them
    assemble           the sections as a manifest

Writing:

    torch_state_dict   state dicts as torch builds them, before any tensor is sharded
    sharded_writer     DTensor and ShardedTensor for their pickles
    slots              the tensors of one rank's file
"""
