"""Prove that a family of models goes from Hugging Face to Megatron and back.

    python -m tests.support.megatron [--work DIR] [--rules FILE] [CONFIG ...]

It needs megatron-core and transformers, and no GPU.

    proof    the steps of a proof, and its results; __main__: the command line
    models   builds a tiny random model of any configuration of transformers
    mtp      the layers that predict several tokens ahead (multi-token prediction)
    ranks    starts the processes that load a checkpoint into Megatron-core
    worker   the code of these processes
    core     builds a model of Megatron-core from the arguments in a checkpoint
    hybrid   Mamba layers on a CPU
    delta    gated delta nets on a CPU
    fused    layers with the names of Transformer Engine's layers
    cpu      stand-ins for the CUDA calls of Megatron-core
"""
