"""The result of one check of a checkpoint: its status, what it covered, and its findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, WARNED = "passed", "failed", "warned"
NOT_APPLICABLE, NOT_RUN = "not applicable", "not run"


@dataclass(slots=True)
class Check:
    """The result of one check.

    Args:
        name: one of `names`.
        looked_at: what the check covered, or why it covered nothing.
        failures, warnings: one line for each finding.
        applies: whether the checkpoint has anything that the check covers.
        ran: whether the check ran; a source that cannot be read stops at the first failure.
        exit_code: exit code of the command if this check fails: 1 incomplete or different,
            3 corrupt, 5 unsafe.
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
        """The outcome as one word, the value of ``status`` in the JSON report."""
        if not self.ran:
            return NOT_RUN
        if self.failures:
            return FAILED
        if self.warnings:
            return WARNED
        return PASSED if self.applies else NOT_APPLICABLE

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the status."""
        return {"status": self.status, **asdict(self)}


def not_applicable(name: str, reason: str) -> Check:
    """Return the result of a check that does not apply to this checkpoint."""
    return Check(name, reason, applies=False)


def not_run(name: str, reason: str) -> Check:
    """Return the result of a check that did not run."""
    return Check(name, reason, ran=False)
