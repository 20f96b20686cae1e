"""Stacked bars: one bar per name, whose parts are sizes in bytes, and a limit for all bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reshard import units


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of every bar: its label, and its size in each bar."""

    label: str
    values: Sequence[int]


@dataclass(frozen=True, slots=True)
class DrawnPart:
    """One part of one bar as the markup draws it; ``number`` chooses its color."""

    number: int
    label: str
    size: str
    percent: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar as the markup draws it."""

    name: str
    size: str
    exceeds: bool
    pieces: Sequence[DrawnPart]


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars with one scale.

    Args:
        limit: the size that no bar should exceed, drawn as a line with its label.
    """

    title: str
    names: Sequence[str]
    parts: Sequence[BarPart]
    limit: int
    limit_label: str

    @property
    def limit_percent(self) -> float:
        """The position of the limit."""
        return 100 * self.limit / self._longest

    def list_bars(self) -> Iterator[Bar]:
        """Yield the bars from top to bottom."""
        for row, name in enumerate(self.names):
            total = self._add_up(row)
            pieces = [
                DrawnPart(
                    number,
                    part.label,
                    units.show_bytes(part.values[row]),
                    100 * part.values[row] / self._longest,
                )
                for number, part in enumerate(self.parts, 1)
                if part.values[row]
            ]
            yield Bar(name, units.show_bytes(total), total > self.limit, pieces)

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page: none, because the markup has the bars."""
        return {}

    def _add_up(self, row: int) -> int:
        return sum(part.values[row] for part in self.parts)

    @property
    def _longest(self) -> int:
        return max([self.limit, *(self._add_up(row) for row in range(len(self.names)))])
