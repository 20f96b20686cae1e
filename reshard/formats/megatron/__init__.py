"""Checkpoints of Megatron-LM and Megatron-core: torch, torch_dist, and fsdp_dtensor (only read).

    format           the format as one object: how it is found, read and written
    directory        where checkpoints are, and which rank each folder is of
    arguments        the run's command line: sizes, the pipeline's layout
    inferred         the grid, gates and experts that no argument states, as folders show them
    run_config       the arguments of a run of Megatron-Bridge
    verl             what verl saves beside torch_dist, and its three directories as one
    names            local, global and stacked names
    parameter_order  the order of a model's parameters
    optimizers       the state of a rank's optimizer, in lists and in flat buffers
    grouped          tensors that store several parameters, or one whose heads are in an old order
    rank             one rank's files
    model            the parameters of a rank, if no file lists them
    model_chunk      the layers and experts of a model chunk
    stated           what files state twice, by arguments and tensors or on every rank
    rank_states the states that ranks save beside tensors
    kept_states which of these states a conversion keeps
    legacy           the torch format: a folder for each rank
    dist             the torch_dist format: DCP with Megatron's keys
    fsdp             the fsdp_dtensor format: DCP of Megatron FSDP
    grid             the manifests of all ranks joined
    train            the training state beside the tensors
    translate        the training state in the form that other frameworks load
    write            the files of other ranks, in either format

Facts: Megatron-LM core_v0.16.1; torch_dist of core 0.19 also.
"""
