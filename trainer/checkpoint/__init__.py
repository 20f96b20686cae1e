"""Checkpoint files: what is written, in whose layout, and how it appears whole or not at all.

saving          save and resume, whatever the engine
contents        what a rank writes, and copies of it in host memory
background      saves that training does not wait for
directory       the run directory: ``<tag>/`` for each checkpoint, and ``latest``
state           ``trainer_state.json``
files           write to disk and flush, read without running code
any_format      read the checkpoint of any other program, through reshard
stamps          what each file records about its save
deepspeed       write DeepSpeed's directory
deepspeed_read  read DeepSpeed's directory with any number of ranks
fsdp            write and read FSDP checkpoints in four forms
fsdp_dcp        directories of torch.distributed.checkpoint
fsdp_match      pickled shards, compared with the live state
foreign         classes of DeepSpeed, without its library
"""
