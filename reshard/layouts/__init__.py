"""Layouts: which blocks of which tensors each rank holds.

partition        rules by which frameworks cut a tensor, or a flat vector of tensors, over ranks
runs             runs of equal length, described by a few numbers
blocks           one block of a tensor in the file of each rank
flat_param       FSDP 1's flat parameters
mesh             device meshes and the placements of DTensors
tensor_parallel  plans of tensor parallelism
model_parallel   rules for each model family: cuts over tensor, pipeline and expert ranks, and names
"""
