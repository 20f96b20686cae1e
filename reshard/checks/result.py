"""The result of one check of a checkpoint: its status, what it looked at, and what it found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, WARNED = "passed", "failed", "warned"
NOT_APPLICABLE, NOT_RUN = "not applicable", "not run"


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
