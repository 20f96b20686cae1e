"""The parts of ZeRO: who owns what, how it is summed, where it lives, when it is whole.

partition  who owns which elements
flat       parameters as views of flat tensors; units: whole only while a layer uses them
reduce     gradients added to their owners' sums
norm       their norm, the same bits in any order
shard      masters and moments of this rank; offload: where they live
state      all of it, as a checkpoint sees it
"""
