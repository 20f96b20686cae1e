"""Checkpoints that DeepSpeed wrote: ZeRO stages 0 to 3 as the ranks saved them, and universal.

    reader      any of them as one manifest
    native      a tag directory as the ranks saved it; kinds: what its files hold
    parallel    the ranks of a model-parallel run, joined
    layers      a pipeline's files
    experts     a mixture of experts, joined with the rest
    expert_files    its files
    expert_optimizers   those of ranks without ZeRO
    expert_names    what its parameters are called
    expert_ranks    which ranks hold which experts
    cuts        how tensor-parallel ranks share a parameter
    affine      what AutoTP says of that
    dialects    whose words a pipeline's names are
    neox        GPT-NeoX's settings
    directory   which files there are, and whether they belong together
    states      the two kinds of file, opened and checked against each other
    flat        stages 1 and 2: one flat tensor a group, in equal pieces
    order       in which order parameters stand in flat tensors
    partitioned
                stage 3: every parameter in equal pieces; swap: optimizer states on disk
    whole       stage 0: whole tensors under an index; fused: around a fused optimizer
    universal   one directory a parameter
    universal_ranks   the ranks that such a directory was made of
    train       everything that is not a tensor
    write       the files of other ranks, native or universal

Facts: DeepSpeed 0.19.8 ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``,
``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``, ``checkpoint/ds_to_universal.py``.
"""

from reshard.formats.deepspeed.directory import NAME, detect

__all__ = ["NAME", "detect"]
