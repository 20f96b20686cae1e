"""The report of ``verify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard import units
from reshard.checks import result
from reshard.checks.result import Check
from reshard.commands.lines import LISTED, Report, format_row
from reshard.units import counted

SCHEMA = 1
_MARKS = {
    result.PASSED: "ok",
    result.FAILED: "FAILED",
    result.WARNED: "warning",
    result.NOT_APPLICABLE: "-",
    result.NOT_RUN: "not run",
}


@dataclass(slots=True, repr=False)
class VerifyReport(Report):
    """The result of `verify`. Sizes in bytes."""

    source: str
    mode: str  # quick or deep
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    checks: list[Check] = field(default_factory=list)
    format: str = ""
    detail: str = ""
    notes: list[str] = field(default_factory=list)  # from the reader
    manifest: str = ""  # path of the manifest that was written
    bytes_read: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """Return whether no check failed."""
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether no check failed; a warning is not a failure."""
        return all(check.status != result.FAILED for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0, or the highest code of the checks that failed: 1 different, 3 corrupt, 5 unsafe."""
        failed = (check for check in self.checks if check.status == result.FAILED)
        return max((check.exit_code for check in failed), default=0)

    def check(self, name: str) -> Check:
        """Return a check by its name."""
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {
            "schema": SCHEMA,
            "command": "verify",
            "source": self.source,
            "format": self.format,
            "detail": self.detail,
            "mode": self.mode,
            "options": self.options,
            "passed": self.passed,
            "exit_code": self.exit_code,
            "checks": [check.to_dict() for check in self.checks],
            "notes": self.notes,
            "manifest": self.manifest,
            "bytes_read": self.bytes_read,
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: a line for each check, followed by its findings."""
        what = ", ".join(filter(None, (self.format, self.detail)))
        yield f"{self.source}: {self._describe_verdict()}" + (f" ({what})" if what else "")
        for check in self.checks:
            yield format_row(check.name, f"{_MARKS[check.status]:<9}{check.looked_at}")
            findings = [*check.failures, *check.warnings]
            yield from (format_row("", f"{'':<9}{text}") for text in findings[:LISTED])
            if len(findings) > LISTED:
                more = f"{len(findings) - LISTED} more (all of them with --json)"
                yield format_row("", f"{'':<9}... {more}")
        yield from (format_row("note", text) for text in self.notes)
        if self.manifest:
            yield format_row("manifest", self.manifest)
        read = f", {units.show_bytes(self.bytes_read)} read" if self.bytes_read else ""
        rate = units.show_bytes(self.bytes_read / max(self.seconds, 1e-9))
        yield format_row("time", f"{self.seconds:.2f} s{read}" + (f", {rate}/s" if read else ""))

    def _describe_verdict(self) -> str:
        failed = [check.name for check in self.checks if check.status == result.FAILED]
        if failed:
            return f"FAILED {', '.join(failed)}"
        warned = sum(check.status == result.WARNED for check in self.checks)
        warnings = f", {counted(warned, 'warning')}" if warned else ""
        agree = ", headers agree" if self.mode == "quick" else ""
        return f"passed the {self.mode} checks{agree}{warnings}"
