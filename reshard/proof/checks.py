"""One check of a checkpoint, by name: what it looked at, and what it found.

The names are a promise, as the options are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, WARNED = "passed", "failed", "warned"
NOT_APPLICABLE, NOT_RUN = "not applicable", "not run"

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


@dataclass(slots=True)
class Check:
    """The result of one check.

    Args:
        looked_at: what was looked at, or why nothing was.
        failures, warnings: a line each.
        applies: whether there was anything to look at.
        ran: whether it was looked at; a source that cannot be read stops at the first failure.
        exit_code: of the command, where it failed: 1 incomplete or different, 3 corrupt, 5 unsafe.
    """

    name: str
    looked_at: str
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    applies: bool = True
    ran: bool = True
    exit_code: int = 1

    @property
    def status(self) -> str:
        """One word."""
        if not self.ran:
            return NOT_RUN
        if self.failures:
            return FAILED
        if self.warnings:
            return WARNED
        return PASSED if self.applies else NOT_APPLICABLE

    def to_json(self) -> dict[str, Any]:
        """With its status."""
        return {"status": self.status, **asdict(self)}


def not_applicable(name: str, reason: str) -> Check:
    """A check that has nothing to look at."""
    return Check(name, reason, applies=False)


def not_run(name: str, reason: str) -> Check:
    """A check that was not made."""
    return Check(name, reason, ran=False)
