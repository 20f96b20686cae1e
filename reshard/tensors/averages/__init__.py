"""Weighted means of several checkpoints' weights, computed as they are read.

coefficients the order of the sources, and the factor of each
matching     which tensors of the sources belong together, and what becomes of them
mean         the mean of one tensor, computed block by block when it is read
sums         the arithmetic: float64 sums of the sources' values, rounded once to float32
"""
