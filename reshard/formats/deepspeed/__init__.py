"""Checkpoints that DeepSpeed wrote: ZeRO stages 0 to 3 as the ranks saved them, and universal.

    format         the format as one object: how it is found, read (by native, parallel, experts or
                   universal) and written
    directory      find the files and sort them by rank
    states         open the two kinds of rank file; schemas: the values that are taken from them
    tag_directory  one model-parallel rank: model states and optimizer states joined
    stage0         whole tensors under an index
    stage12        stages 1 and 2: one flat tensor for each group, in equal pieces
    flat_groups what each rank stores of such a tensor, and states about it (to read and write)
    stage3         every parameter in equal pieces; swap: optimizer states on disk
    elastic        states that elastic_checkpoint took apart
    mics           groups of ranks, of which the first saves
    zenflow        16-bit weights that are newer than their masters
    optimized_linear frozen weights of which the first rank's part is saved
    train_state everything that is not a tensor
    flat_order     the flat tensors of a run, and the order of parameters in them
    parallel       join the ranks of a model-parallel run
    layers         the files of a pipeline's layers
    cuts           how tensor-parallel ranks share a parameter
    dialects       whose naming scheme a pipeline has; neox: GPT-NeoX's settings
    experts        join the ranks of a mixture of experts, of DeepSpeed's own layer or of AutoEP
    universal      one directory for each parameter
    universal_ranks the ranks that such a directory was converted from
    write          lay out the files of other ranks, native or universal

Facts: DeepSpeed 0.19.8 ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``,
``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``, ``checkpoint/ds_to_universal.py``.
"""
