"""Mixtures of experts, of DeepSpeed's own layer and of AutoEP: how their ranks' files are read.

layout        names of experts, and the ranks that hold them
files         open the files of experts
lists         what DeepSpeed before 0.19 leaves out of the model states
optimizers    optimizers of expert-parallel ranks without ZeRO
reader        join the ranks of a mixture of experts
tensor_ranks  the same in a run with tensor-parallel ranks
autoep        runs with AutoEP, under the names of the model without it
"""
