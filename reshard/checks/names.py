"""The names of all checks, which are part of the stable interface, like the options."""

from __future__ import annotations

# Quick checks: they read only headers and names.
HEADERS = "headers"  # every file opens on its own
SAFE = "safe"  # no pickle runs code, no index refers outside its directory
COMPLETE = "complete"  # every rank's file and every listed tensor is present
AGREEMENT = "agreement"  # all files have one step, world size and version, and the same names
INDEX = "index"  # an index lists exactly the files and tensors that exist
COVERAGE = "coverage"  # every element is stored exactly once, inside its file
RANKS = "ranks"  # every file belongs to the rank in its name
STALE = "stale"  # no files from another save
STEPS = "steps"  # counters are consistent
SLOTS = "slots"  # every trained parameter has every slot of the optimizer
MODEL = "model"  # names and shapes match the model
# Deep checks: they read every byte.
CRC = "crc"  # stored checksums match the bytes
REPLICAS = "replicas"  # copies of one block are equal
MASTERS = "masters"  # 16-bit weights are the cast of their fp32 master weights
TIED = "tied"  # tied names have equal values
PADDING = "padding"  # padding is zero
FINITE = "finite"  # no value is NaN or infinite
MOMENTS = "moments"  # sums and means of squares are not negative
ZEROS = "zeros"  # no weight and no moment is all zeros
AGAINST = "against"  # the contents of tensors match a manifest
FILES = "files"  # the bytes of single files match a manifest

QUICK = (
    *(HEADERS, SAFE, COMPLETE, AGREEMENT, INDEX, COVERAGE),
    *(RANKS, STALE, STEPS, SLOTS, MODEL),
)
DEEP = (CRC, REPLICAS, MASTERS, TIED, PADDING, FINITE, MOMENTS, ZEROS, AGAINST)
