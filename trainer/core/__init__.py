"""Sharded data-parallel training, to be read in one evening, in this order.

loop              one optimizer step: draw, forward and backward, update
data              samples by global number, the same for any number of ranks
model             a causal language model, and which of its layers repeat
ranks             this rank, and the collectives that join it to the others
engine            what the loop needs from an engine; the step that all engines share
optimizer         AdamW and its param groups
partition         which rank owns which elements
reduce            gradients travel to their owners and are added there
norm              the gradient norm, exact in any order of addition
shard             fp32 master weights and moments of the elements that this rank owns
zero              what ZeRO stages 0 to 3 share
replicated        stages 0 to 2: the whole model on every rank, as flat tensors
ddp               stage 0: everything is replicated
zero1             stage 1: the optimizer is partitioned
zero2             stage 2: the gradients are partitioned too
units             stage 3: layers that are gathered for their forward and backward pass
zero3             stage 3: the parameters are partitioned too
fsdp              the same idea in PyTorch: what both generations of FSDP share
fsdp2             ``fully_shard``, the second generation
fsdp1             FullyShardedDataParallel, the first generation
fsdp_reduce       gradients of FSDP, added in micro batch order

To look up meanwhile:

settings          every setting that training depends on
model_config      the configuration of the model
schedule          the learning rate of each step
scaling           the loss scale of fp16
fsdp_units        which modules FSDP shards together, and the mesh of the ranks
strategies        the class of each strategy
errors            what can go wrong, with its exit code

Nothing here reads or writes a checkpoint or another program's configuration, and nothing is
imported from the rest of ``trainer``.
"""
