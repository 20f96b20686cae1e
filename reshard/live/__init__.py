"""The files of a split for a program that already runs: computed when it reads them, never written.

files              plan on one rank, the same files on all; the names in a directory
directory          both of these for a library that loads a directory
source             the source as it is, under the names of the live model
names              the source's tensors under the names of the live model
extra_state        schedulers, counters and a script's own values as objects
safe_load          a file of torch.save, with classes of known frameworks only
patched_loads      loads of torch and safetensors that take their content from memory
unread             a file of torch.save whose tensors are read when they are needed
swapped_optimizer  fills the swap files of a DeepSpeed optimizer that is offloaded to NVMe
"""
