"""What goes to disk, in whose layout, and how it appears whole or not at all.

saving         saving and resuming, whatever the engine; state: ``trainer_state.json``
directory      ``<tag>/`` for each checkpoint, and ``latest``; files: written for good, read safely
deepspeed      DeepSpeed's directory written; deepspeed_read: read by any number of ranks
fsdp           the four forms of FSDP; fsdp_dcp: its directories, fsdp_match: its pickled shards
megatron       Megatron-LM's directory written; megatron_read: read into any grid
megatron_args  what it says beside tensors; megatron_rules: how parameters are named and cut
foreign        their classes, without their libraries
stamps         what each file says of the save that it belongs to
"""
