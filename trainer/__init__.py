"""A minimal sharded trainer: ZeRO 0-3 and FSDP, per-rank checkpoints, bit-exact resume.

It writes the files that DeepSpeed and PyTorch write. It does not import DeepSpeed, and imports
``reshard`` only for ``--auto`` and to resume from other programs' checkpoints.

Read ``core`` first, in the order of its docstring; that takes an evening. The rest adapts it to
other programs:

================================  ================================================================
core/                             the loop, the data, the model, ddp, ZeRO 1 to 3, FSDP
schedule, scaling, offload        learning rate and loss scale of DeepSpeed; CPU and disk offload
fsdp_options                      what the options of FSDP mean
engines/                          the choice of the engine; FSDP 1
checkpoint/                       files in the layouts of DeepSpeed and FSDP
config/                           ds_config.json, accelerate.yaml and config.json, read
auto                              --auto: the first strategy that fits the memory
settings, resolve                 every option once; derived values and contradictions
cli, launch, session              flags; one process becomes N; one run on one rank
process_group, environment        join the other ranks; what the launcher has set
log, timer, memory                a line per step; seconds by activity; bytes by stage
export, tokenizer                 the 16-bit model at the end; tokens are bytes
errors                            what can go wrong, with its exit code
================================  ================================================================
"""
