"""The lines of reports as text, and reports as Python and notebooks show them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from reshard import units
from reshard.errors import cut_middle

_LONGEST_LINE, _LONGEST_WORD = 8000, 1000  # characters
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")
LISTED = 8  # items of a list that a report shows; --json has all of them
_LABEL = 11  # characters of the first column
_WIDEST = 24  # characters of the first column at most, if labels are longer


def make_printable(text: str) -> str:
    r"""Return a line with escapes for all characters that are not printable, and of limited length.

    Names come from files and may contain line breaks, terminal escape sequences, changes of the
    writing direction, and lone surrogates (for bytes of a file name that are not UTF-8). A long
    word or line loses its middle.

    >>> make_printable("w\x1b[31m")
    'w\\x1b[31m'
    >>> make_printable("w" * 10**5).replace("w" * 500, "...")
    '... [99000 more characters] ...'
    """
    if len(text) > _LONGEST_WORD:
        words = _LONG_WORD.sub(lambda match: cut_middle(match[0], _LONGEST_WORD), text)
        text = cut_middle(words, _LONGEST_LINE)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class LabelledLine(str):
    """A line with a label in its first column."""

    __slots__ = ("label", "text")
    label: str
    text: str

    def __new__(cls, label: str, text: str, indent: str = "", width: int = _LABEL) -> LabelledLine:
        """Return the line; a label that is longer than ``width`` moves the text."""
        row = super().__new__(cls, f"{indent}{label:<{width}} {text}")
        row.label, row.text = label, text
        return row


class DetailLine(LabelledLine):
    """A line that few readers need: the command line shows it with ``-v``."""

    __slots__ = ()


class Report:
    """A result with lines of text: ``print`` shows all of them, a notebook a table."""

    __slots__ = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the document of `to_dict` as text, as ``--json`` prints it."""
        import json

        return json.dumps(self.to_dict(), indent=2, default=str)

    def __str__(self) -> str:
        return "\n".join(map(make_printable, self.lines()))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {make_printable(next(iter(self.lines()), ''))}>"

    def _repr_html_(self) -> str:
        return f"<table>{''.join(map(_format_html_row, self.lines()))}</table>"


def _format_html_row(line: str) -> str:
    import html

    cells = (line.label, line.text) if isinstance(line, LabelledLine) else (line,)
    style = ' style="text-align:left"'
    if len(cells) == 1:
        style += ' colspan="2"'
    shown = (html.escape(make_printable(cell)) for cell in cells)
    return f"<tr>{''.join(f'<td{style}>{cell}</td>' for cell in shown)}</tr>"


def format_row(label: str, text: str) -> LabelledLine:
    """Return a line with its label in the first column."""
    return LabelledLine(label, text)


def align(rows: Sequence[LabelledLine]) -> Iterator[LabelledLine]:
    """Yield the rows with the first column as wide as their longest label, within limits."""
    longest = max((len(row.label) for row in rows), default=0)
    width = min(max(longest, _LABEL), _WIDEST)
    return (type(row)(row.label, row.text, "  ", width) for row in rows)


def format_list(
    label: str, items: Sequence[str], row: type[LabelledLine] = LabelledLine
) -> Iterator[str]:
    """Yield a line for each of the first items, and one with the number of further items."""
    for item in items[:LISTED]:
        yield row(label, item)
    if len(items) > LISTED:
        yield row(label, f"... {len(items) - LISTED} more (all of them with --json)")


def format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, the first column flush left, the other ones flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells])


def format_timing(nbytes: int, seconds: float, checked: str) -> str:
    """Return the line that shows how long writing took, and how the output was checked."""
    rate = units.show_bytes(nbytes / max(seconds, 1e-9))
    return format_row("time", f"{seconds:.2f} s, {rate}/s; {checked}")
