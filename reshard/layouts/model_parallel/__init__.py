"""Model parallelism: how a model is cut over tensor, pipeline and expert ranks, and its names.

    moves            blocks of one tensor that are blocks of another: the only geometry
    shifted          values plus a constant, where the two sides define a norm differently
    segments         the rows of a fused parameter that are cut apart
    shards           the part of a parameter that a tensor-parallel rank holds
    architecture     the sizes of a model that rules need; a model as a target needs it
    patterns         names with fields, as tables write them
    adapters         LoRA matrices of Megatron's linear layers
    rules            tables: how each parameter is cut and what Hugging Face calls it
    fused_tensors    how a fused tensor is made of its parts, in both directions
    spellings        Hugging Face's names of a parameter: the lines of a table
    traits           what decides which of Hugging Face's models a model is
    megatron_traits  the traits in Megatron's arguments
    families         the transformers model with given traits, and its config
    config_keys      which keys of a config change a model, and which do not
    vocabulary       the rows of an embedding that are padding
    yarn             positions scaled by YaRN, in the settings of transformers and megatron-core
    names            a manifest under the other side's names, with tensors fused or cut
    sizes            the numbers of tensor, pipeline, expert and virtual ranks; layers of stages
    combine          the manifests of model-parallel ranks joined

Every function edits manifests; no byte moves.
"""
