"""A minimal sharded trainer: ZeRO 0-3 and FSDP, per-rank checkpoints, bit-exact resume.

It writes what DeepSpeed and PyTorch write, imports neither DeepSpeed nor ``reshard``, and is short
enough to read in an evening. Start at ``loop.py``; each file has one idea:

=================  =========================================================================
settings           every choice, with its flag, default and meaning
config/            ds_config.json and accelerate.yaml read into settings
cli, resolve       a flag for each; what follows from the ranks, or contradicts itself
launch, ranks      one process becomes N; what a rank knows of the others
environment        what whoever started the process has told it
model, data        a causal LM; samples numbered globally, drawn by counter; tokenizer: bytes
optimizer          AdamW and its param groups
schedule, scaling  learning rate and loss scale, as pure functions of few numbers
engines/           how a model is trained on N ranks: ddp, zero1-3, fsdp, fsdp2, grid, deepspeed
parallel/          how a model itself is cut: by tensor, by pipeline stage, by expert
zero/              the parts of ZeRO: partition, reduction, norm, shard, gathering, offload
checkpoint/        what goes to disk, in whose layout, and how it appears whole or not at all
loop, log          a step, and what is told about it; timer, memory: what it costs
export             the 16-bit model at the end
tensors, errors    small words about tensors; what can go wrong, with its exit code
=================  =========================================================================
"""
