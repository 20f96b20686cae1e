"""The HTML page of a report (``--html``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.commands.options import ReportOptions
from reshard.errors import ReshardError
from reshard.system.paths import as_path

if TYPE_CHECKING:  # imported only if a page is written: it takes time
    from reshard.html.page import Page


def check_page(
    options: ReportOptions, sources: Sequence[Path], destination: Path | None = None
) -> None:
    """Check that the page can be written, before any work is done.

    Args:
        destination: where the command writes its output.
    """
    if options.html is not None:
        from reshard.html import document

        document.check(
            as_path(options.html), sources, overwrite=options.overwrite, destination=destination
        )


def write_page(options: ReportOptions, build: Callable[[], Page], *, written: str = "") -> None:
    """Write the page that ``build`` returns, complete or not at all.

    Args:
        written: the output that the command has written already.

    Raises:
        ReshardError: the page cannot be written; the message says that the output is complete.
    """
    if options.html is None:
        return
    from reshard.html import document

    try:
        document.write(build(), as_path(options.html), overwrite=options.overwrite)
    except ReshardError as error:
        if written:
            error.remedy = "; ".join(filter(None, [error.remedy, describe_whole_output(written)]))
        raise


def describe_whole_output(written: str) -> str:
    """Return the sentence that an error adds if only the report of an output failed."""
    return f"{written} was written completely before this"
