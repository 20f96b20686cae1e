"""The lines of reports as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard import units

LISTED = 8  # items of a list that a report shows; --json has all of them


def make_printable(text: str) -> str:
    r"""Return a line with escapes for all characters that are not printable.

    Names come from files and may contain line breaks, terminal escape sequences, changes of the
    writing direction, and lone surrogates (for bytes of a file name that are not UTF-8).

    >>> make_printable("w\x1b[31m")
    'w\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def format_row(label: str, text: str) -> str:
    """Return a line with its label in the first column."""
    return f"{label:<12}{text}"


def format_list(label: str, items: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of the first items, and one with the number of further items."""
    for item in items[:LISTED]:
        yield format_row(label, item)
    if len(items) > LISTED:
        yield format_row(label, f"... {len(items) - LISTED} more (all of them with --json)")


def format_timing(nbytes: int, seconds: float, *, verified: bool) -> str:
    """Return the line that shows how long writing took, and whether the output was read back."""
    rate = units.show_bytes(nbytes / max(seconds, 1e-9))
    checked = "every byte read back" if verified else "not verified (--no-verify)"
    return format_row("time", f"{seconds:.2f} s, {rate}/s; {checked}")
