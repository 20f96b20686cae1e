"""The parts of a page. All texts are plain: `document` escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reshard.html.bars import Bars
from reshard.html.curves import Curves
from reshard.html.shards import Shards

Tone = Literal["good", "bad", "plain"]
Type = Literal["text", "name", "number", "bytes", "state"]


@dataclass(frozen=True, slots=True)
class Facts:
    """A panel of labels and values, beside the other panels of a page."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Findings:
    """A list of what was kept, derived, dropped, noted or warned about, one line each."""

    title: str
    items: Sequence[str]
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        type: ``name`` is shown in a monospaced font; ``bytes`` are shown as sizes; a ``state`` is a
            word such as ``passed`` or ``failed``, ``yes`` or ``no``, in its colour.
        values: one text or number per row; None is an empty cell.
    """

    title: str
    type: Type
    values: Sequence[str | float | None]


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table whose rows can be sorted and filtered, up to thousands of them."""

    title: str
    columns: Sequence[Column]
    text: str = ""  # a sentence above the table

    @property
    def height(self) -> int:
        """The number of rows."""
        return len(self.columns[0].values) if self.columns else 0

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page, column by column."""
        return {
            "title": self.title,
            "columns": [
                {"title": c.title, "type": c.type, "values": list(c.values)} for c in self.columns
            ],
        }


@dataclass(frozen=True, slots=True)
class Maps:
    """The maps of the bytes on each side, for example before and after a conversion.

    Args:
        singled: (kind, fqn) of tensors that the viewer may show alone; the kind ``weight`` means a
            parameter, its master or a buffer.
        singled_as: the label of the switch that shows them alone.
    """

    sides: Sequence[Shards]
    singled: Sequence[tuple[str, str]] = ()
    singled_as: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page."""
        return {
            "sides": [shards.to_json() for shards in self.sides],
            "singled": [list(key) for key in self.singled],
            "singled_as": self.singled_as,
        }


Section = Bars | Curves | Maps | PageTable


@dataclass(frozen=True, slots=True)
class Page:
    """The report of one command.

    Args:
        title: path that the command read, or wrote.
        verdict: the outcome in a few words.
        facts: panels side by side.
        sections: parts that scripts draw, in this order.
    """

    command: str
    title: str
    verdict: str
    tone: Tone
    facts: Sequence[Facts] = ()
    findings: Sequence[Findings] = ()
    sections: Sequence[Section] = ()
