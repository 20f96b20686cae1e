"""What a page is made of. Texts are plain: the document escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reshard.html.curves import Curves
from reshard.html.shards import Shards

Tone = Literal["good", "bad", "plain"]
Type = Literal["text", "name", "number", "bytes", "state"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and what there is to say, beside the other facts of a page."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Findings:
    """What was kept, derived, dropped, noted or warned of: a line each."""

    title: str
    items: Sequence[str]
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        type: ``name`` is set in a fixed pitch; ``bytes`` are shown as sizes; a ``state`` is a word
            such as ``passed`` or ``failed``, ``yes`` or ``no``, in its colour.
        values: a text or a number a row; None where there is none.
    """

    title: str
    type: Type
    values: Sequence[str | float | None]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that sort and filter, thousands of them."""

    title: str
    columns: Sequence[Column]
    text: str = ""  # a sentence above it

    @property
    def height(self) -> int:
        """How many rows."""
        return len(self.columns[0].values) if self.columns else 0

    def to_json(self) -> dict[str, Any]:
        """The data of the page, a column after the other."""
        return {
            "title": self.title,
            "columns": [
                {"title": c.title, "type": c.type, "values": list(c.values)} for c in self.columns
            ],
        }


@dataclass(frozen=True, slots=True)
class Maps:
    """Where the bytes lie on each side, before and after.

    Args:
        singled: (kind, fqn) of tensors that the reader may look at alone; ``weight`` is of a
            parameter, its master or a buffer.
        singled_as: what these are called.
    """

    sides: Sequence[Shards]
    singled: Sequence[tuple[str, str]] = ()
    singled_as: str = ""

    def to_json(self) -> dict[str, Any]:
        """The data of the page."""
        return {
            "sides": [shards.to_json() for shards in self.sides],
            "singled": [list(key) for key in self.singled],
            "singled_as": self.singled_as,
        }


Section = Curves | Maps | Table


@dataclass(frozen=True, slots=True)
class Page:
    """The report of one command.

    Args:
        command: whose.
        title: what it was done to.
        verdict: the outcome in a few words.
        facts: panels side by side.
        sections: what scripts draw, in this order.
    """

    command: str
    title: str
    verdict: str
    tone: Tone
    facts: Sequence[Facts] = ()
    findings: Sequence[Findings] = ()
    sections: Sequence[Section] = ()
