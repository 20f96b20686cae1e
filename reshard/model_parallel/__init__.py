"""Model parallelism: how a model is cut over tensor, pipeline and expert ranks, and its names.

    moves         blocks of one tensor that are blocks of another: the only geometry
    shards        the part of a parameter that a tensor-parallel rank holds
    architecture  the few numbers of a model that a rule needs
    patterns      names with fields, as tables write them
    rules         tables: a line a parameter, how it is cut and what Hugging Face calls it
    forms         how a fused tensor is made of its parts, in both directions
    spellings     what Hugging Face calls a parameter: the lines of a table
    traits        what kind of model it is; megatron_traits: the same in Megatron's arguments
    families      which of Hugging Face's models that is, and its config
    config_keys   which keys of such a config change a model, and which do not
    vocabulary    the rows of an embedding that are words, and those that are padding
    yarn          positions scaled by YaRN, in the settings of transformers and of megatron-core
    described     a model as a target needs it
    names         a manifest under the other side's names, fused and split as those want it
    sizes         over how many ranks, each way
    stages        which layers each pipeline stage has
    combine       the manifests of many model-parallel ranks made one

Every function edits manifests; no byte moves.
"""
