"""The report of an average: the checkpoints with their factors, and what was written of the mean.

The mean is written as `merge` writes weights, or in a layout of `split`, whose report is in
`reshard.commands.average.layout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reshard.checks.identity import Identity
from reshard.commands.lines import DetailLine, format_list, format_row
from reshard.commands.merge.report import MergeReport
from reshard.commands.output_report import OutputReport
from reshard.units import abridge, counted


@dataclass(kw_only=True, repr=False)
class AverageReport(OutputReport):
    """The result of `average`.

    Args:
        sources: for each checkpoint, in the order of the sum: its path, its format, the step that
            it states, and its factor as a number and as the user gave it.
        means: the number of tensors that were averaged.
        equal: the tensors that are not averaged, because all checkpoints have the same value.
        arithmetic: how the mean is computed.
        optimizer_tensors_left: the number of optimizer tensors of the checkpoints.
        other_identities: as ``identity``, of all checkpoints but the first one that the user named.
    """

    COMMAND: ClassVar[str] = "average"

    sources: list[dict[str, Any]] = field(default_factory=list)
    means: int = 0
    equal: list[str] = field(default_factory=list)
    arithmetic: str = ""
    optimizer_tensors_left: int = 0
    other_identities: list[Identity] = field(default_factory=list)

    def _list_identity(self) -> Iterator[str]:
        if self.identity is not None and self.identity.trust == "none":
            return super()._list_identity()
        counts = Counter(map(str, filter(None, (self.identity, *self.other_identities))))
        lines = [
            f"{count} of {len(self.sources)} checkpoints: {text}" for text, count in counts.items()
        ]
        return format_list("identity", lines, DetailLine)

    def add_average(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield the lines of a report, with those of the average after the first one."""
        yield next(lines)
        shown = [
            f"{source['weight']:.6g} x {source['path']} ({source['format']}"
            + (f", step {source['step']})" if source["step"] is not None else ")")
            for source in self.sources
        ]
        yield from format_list("average", shown)
        yield format_row("arithmetic", self.arithmetic)
        if self.equal:
            count = counted(len(self.equal), "tensor")
            yield format_row("equal", f"{count} taken as they are: {abridge(self.equal)}")
        yield from lines


@dataclass(kw_only=True, repr=False)
class MergedAverage(AverageReport, MergeReport):
    """The result of `average` that is written as `merge` writes weights."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        yield from self.add_average(MergeReport.lines(self))
