"""Checkpoint files: what is written, in whose layout, and how it appears whole or not at all.

saving          save and resume, whatever the engine
contents        what a rank writes, and copies of it in host memory
background      saves that training does not wait for
directory       the run directory: ``<tag>/`` for each checkpoint, and ``latest``
state           ``trainer_state.json``
files           write to disk and flush, read without running code
any_format      read any other checkpoint, through reshard
deepspeed       write DeepSpeed's directory
deepspeed_read  read DeepSpeed's directory of the same stage and ranks
fsdp            write FSDP checkpoints in four forms, read one of them
fsdp_dcp        directories of torch.distributed.checkpoint
foreign         classes of DeepSpeed, without its library
"""
