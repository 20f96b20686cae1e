"""Checkpoints of Megatron-LM and Megatron-core, in the torch and the torch_dist format.

    reader      either format as one manifest
    format      the format as one object: how it is found, read and written
    directory   where they lie, which rank each folder is of
    arguments   the run's command line: sizes, the pipeline's layout
    names       local, global and stacked names
    order       where a parameter stands in the model
    grouped     tensors that hold several parameters, or one in an old order
    buckets     the distributed optimizer's flat buffers
    groups      which param group a parameter is in
    optimizer   every form of a rank's optimizer
    rank        one rank's files
    model       what a rank holds, where no file lists it; share: of which layers and experts
    own         what ranks save beside the model's tensors; rank_states: what becomes of it
    legacy      the torch format: a folder a rank
    dist        the torch_dist format: DCP with Megatron's keys
    dist_flat   the distributed optimizer's buffers there
    grid        the ranks' parts made one
    train       what is no tensor
    write       the files of other ranks, in either format

Facts: Megatron-LM core_v0.16.1; torch_dist of core 0.20 also.
"""
