"""Lay out the files that FSDP's ranks save with ``torch.save``; `pytorch` reads them.

rank_files       FSDP 2's DTensors, whole files, and the names that libraries give to files
flat_files       FSDP 1's flat parameters; flat_units: their layout
flat_optimizers  the raw optimizer of each rank under FSDP 1
"""
