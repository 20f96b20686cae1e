"""Layouts of tensors: partitions, equal runs, flat parameters, meshes, tensor-parallel plans."""
