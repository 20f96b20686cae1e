"""How every report writes its lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard import units

LISTED = 8  # of many; all of them with --json


def printable(text: str) -> str:
    r"""A line as a terminal may have it: names come from files, and may hold what it would obey.

    Line breaks, escape sequences, what turns the direction of writing, and halves of surrogate
    pairs (a file name that is no UTF-8 has such) are shown as Python writes them.

    >>> printable("w\x1b[31m")
    'w\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def row(label: str, text: str) -> str:
    """One line: a label, and what there is to say."""
    return f"{label:<12}{text}"


def listed(label: str, items: Sequence[str]) -> Iterator[str]:
    """A line each for the first, and how many more there are."""
    for item in items[:LISTED]:
        yield row(label, item)
    if len(items) > LISTED:
        yield row(label, f"... {len(items) - LISTED} more (all of them with --json)")


def written(nbytes: int, seconds: float, *, verified: bool) -> str:
    """How long it took to write, and whether that was read back."""
    rate = units.show_bytes(nbytes / max(seconds, 1e-9))
    checked = "every byte read back" if verified else "not verified (--no-verify)"
    return row("time", f"{seconds:.2f} s, {rate}/s; {checked}")
