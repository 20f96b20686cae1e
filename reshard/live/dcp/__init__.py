"""A reader of any checkpoint for `torch.distributed.checkpoint.load`.

reader        the methods that DCP calls, in their order
target        the keys of a target, and what the checkpoint has for each
blocks        blocks of tensors, read into the memory of the target
plain_items   what is not a block: steps, hyperparameters and missing keys
live_objects  live models and optimizers of torch, filled by the reader
"""
