"""The names of the checks. They are a promise to users, as the options are."""

from __future__ import annotations

# Quick: headers and names alone.
HEADERS = "headers"  # every file opens by itself
SAFE = "safe"  # no pickle asks for code, no index leaves its directory
COMPLETE = "complete"  # every rank's file, every tensor that is announced
AGREEMENT = "agreement"  # one step, one world size, one version, the same names and shapes
INDEX = "index"  # an index and its files, both ways
COVERAGE = "coverage"  # every element stored exactly once, inside its file
RANKS = "ranks"  # every file is the rank's whose name it has
STALE = "stale"  # nothing of another save
STEPS = "steps"  # counters that fit together
SLOTS = "slots"  # every trained parameter has every slot of the optimizer
MODEL = "model"  # names and shapes are those of the model
# Deep: every byte.
CRC = "crc"  # stored checksums
REPLICAS = "replicas"  # copies of one block, equal
MASTERS = "masters"  # 16-bit weights, the cast of their fp32 masters
TIED = "tied"  # names of one weight, equal
PADDING = "padding"  # zero
FINITE = "finite"  # no NaN, no infinity
MOMENTS = "moments"  # what cannot be negative is not
ZEROS = "zeros"  # no weight and no moment of nothing but zeros
AGAINST = "against"  # the contents of a manifest

QUICK = (
    *(HEADERS, SAFE, COMPLETE, AGREEMENT, INDEX, COVERAGE),
    *(RANKS, STALE, STEPS, SLOTS, MODEL),
)
DEEP = (CRC, REPLICAS, MASTERS, TIED, PADDING, FINITE, MOMENTS, ZEROS, AGAINST)
