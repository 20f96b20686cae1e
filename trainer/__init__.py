"""A minimal sharded trainer: ZeRO 0-3 and FSDP, per-rank checkpoints, bit-exact resume.

It writes the files that DeepSpeed and PyTorch write. It does not import DeepSpeed, and imports
``reshard`` only to resume from a checkpoint of another layout or of other ranks.

Read ``core`` first, in the order of its docstring; that takes an evening, and ``core`` imports
nothing from the rest:

================================  ================================================================
core/                             the loop, the data, the model, ddp, ZeRO 1 to 3, FSDP
checkpoint/                       files in the layouts of DeepSpeed and FSDP
settings, resolve                 every option once; derived values and contradictions
choices, config_files             where a value comes from; ds_config.json, accelerate.yaml, read
cli, launch, session              flags; one process becomes N; one run on one rank
process_group, environment        join the other ranks; what the launcher has set
cores                             CPU cores of the threads of gloo
log, tokenizer                    a line per step; tokens are bytes
================================  ================================================================
"""
