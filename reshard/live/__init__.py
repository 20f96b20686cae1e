"""A checkpoint for a program that already runs: computed when it is read, never written.

dcp                a reader for torch.distributed.checkpoint, and what it fills
files              the files of a split: plan on one rank, the same files on all; a directory of
                   their names
source             the source as it is, under the names of the live model
names              the source's tensors under the names of the live model
memory             the parameters, masters and slots in the memory of a rank, by names
comparison         these compared with the source, after a load
safe_load          a file of torch.save, with classes of known frameworks only; schedulers, counters
                   and a script's own values as objects
patched_loads      a directory whose files torch and safetensors load from memory
swapped_optimizer  fills the swap files of a DeepSpeed optimizer that is offloaded to NVMe
"""

from reshard.system.optional import require

require("torch", "loading into a running program")
