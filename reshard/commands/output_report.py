"""The common part of the reports of all commands that write a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from reshard import units
from reshard.checks.identity import Identity
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.commands.leaf_counts import count_leaves
from reshard.commands.lines import DetailLine, Report, format_list, format_row, format_timing
from reshard.core.manifest import Manifest, Skeleton
from reshard.engine.move.outcome import Outcome
from reshard.engine.planning.planner import Plan

if TYPE_CHECKING:
    from reshard.commands.forecast import Forecast


_NOT_CHECKED = (
    "--trust none: nothing checked that the files are of one save, and each of its own rank; files"
    " that do not belong together make a wrong output"
)


class WriteResult(NamedTuple):
    """The result of writing an output.

    Args:
        resumed_bytes: bytes of it that an interrupted run had written.
    """

    outcome: Outcome
    resumed_bytes: int
    notes: list[str]


@dataclass(kw_only=True, repr=False)
class OutputReport(Report):
    """The result of a command. Sizes in bytes; ``done`` is False for a dry run."""

    SCHEMA: ClassVar[int] = 1
    COMMAND: ClassVar[str]

    source: str
    format: str
    destination: str = ""
    load_line: str = ""  # how a program loads the output; ``{path}`` until `set_destination`
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    done: bool = False
    already_there: bool = False  # an earlier command wrote the same output
    verified: bool = False
    files: list[dict[str, Any]] = field(default_factory=list)  # name, bytes
    identity: Identity | None = None  # evidence that the files belong to one save
    leaves: dict[str, Any] = field(default_factory=dict)  # see `count_leaves`
    overflowed: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    resumed_bytes: int = 0  # the part that an interrupted run had written
    seconds: float = 0.0
    forecast: Forecast | None = None  # only in a dry run

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {"schema": self.SCHEMA, "command": self.COMMAND, **asdict(self)}

    def set_destination(self, destination: str) -> None:
        """Set where the output is written."""
        self.destination = destination
        self.load_line = self.load_line.replace("{path}", destination)

    def add_result(self, written: WriteResult, *, verified: bool) -> None:
        """Add what is known once the output is complete."""
        self.overflowed = dict(written.outcome.overflowed)
        self.resumed_bytes = written.resumed_bytes
        self.warnings += written.notes
        self.verified = verified
        self.done = True

    def _format_written(self, nbytes: int) -> str:
        if self.already_there:
            return f"already there: {self.destination}, from the same source with the same options"
        verb = "wrote" if self.done else "would write"
        count = units.counted(len(self.files), "file")
        return f"{verb} {self.destination}: {units.show_bytes(nbytes)} in {count}"

    def _describe_check(self) -> str:
        if self.verified:
            return "every byte read back"
        return "not read back" + (" (--no-verify)" if "verify" in self.options else "")

    def _list_identity(self) -> Iterator[str]:
        if self.identity is not None and self.identity.trust == "none":
            return iter([format_row("warning", _NOT_CHECKED)])
        return format_list("identity", [str(self.identity)] if self.identity else [], DetailLine)

    def _list_timing(self) -> Iterator[str]:
        if self.resumed_bytes:
            size = units.show_bytes(self.resumed_bytes)
            yield format_row("resumed", f"{size} of an interrupted run")
        if self.done and not self.already_there:
            yield format_timing(self.bytes_written, self.seconds, self._describe_check())
        if self.done and self.load_line:
            yield format_row("load it", self.load_line)
        if self.forecast is not None:
            yield format_row("forecast", self.forecast.describe())


def list_values(counts: Mapping[str, int]) -> list[str]:
    """Return a line for each tensor with the number of its values."""
    return [f"{name}: {count} values" for name, count in counts.items()]


def describe_common(
    manifest: Manifest, skeleton: Skeleton, plan: Plan, warnings: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of `OutputReport` that are known before the first byte moves.

    Args:
        warnings: further ones than those of the manifest.
    """
    return {
        "source": manifest.origin.path,
        "format": manifest.origin.description,
        "files": [{"name": file.name, "bytes": file.nbytes} for file in skeleton.files],
        "leaves": count_leaves(manifest),
        "warnings": [*manifest.warnings, *find_counter_conflicts(manifest), *warnings],
        "bytes_read": plan.copied_bytes,
        "bytes_written": skeleton.nbytes,
    }
