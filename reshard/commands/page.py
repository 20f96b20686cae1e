"""The page that a command writes beside its report, where one is asked for with ``--html``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from reshard.errors import ReshardError
from reshard.paths import as_path

if TYPE_CHECKING:  # its imports cost time that only a page is worth
    from reshard.html.page import Page


class PageOptions(Protocol):
    """Options of a command whose report can be a page."""

    @property
    def html(self) -> str | Path | None:
        """Where to write it; None: nowhere."""

    @property
    def overwrite(self) -> bool:
        """Whether it may replace what is there."""


def check_page(
    options: PageOptions, sources: Sequence[Path], destination: Path | None = None
) -> None:
    """Refuse a place for the page before any work is done.

    Args:
        destination: where the command writes its output.

    Raises:
        ExistsError: it exists, or lies inside a source or the output.
        UsageError: there is no directory for it.
    """
    if options.html is not None:
        from reshard.html import document

        document.check(
            as_path(options.html), sources, overwrite=options.overwrite, destination=destination
        )


def write_page(options: PageOptions, make: Callable[[], Page], *, written: str = "") -> None:
    """Write the page that ``make`` gives, whole or not at all.

    Args:
        written: the output that the command has written before.

    Raises:
        ReshardError: it cannot be written; the message says that the output is whole.
    """
    if options.html is None:
        return
    from reshard.html import document

    try:
        document.write(make(), as_path(options.html), overwrite=options.overwrite)
    except ReshardError as error:
        if written:
            error.remedy = "; ".join(filter(None, [error.remedy, whole(written)]))
        raise


def whole(written: str) -> str:
    """Return what to say of an output where only the report of it failed."""
    return f"{written} was written before, whole"
