"""The page that a command writes beside its report, where one is asked for with ``--html``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.commands.reading import ReadOptions

if TYPE_CHECKING:  # its imports cost time that only a page is worth
    from reshard.html.page import Page


def check_page(
    options: ReadOptions, sources: Sequence[Path], destination: Path | None = None
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
            Path(options.html), sources, overwrite=options.overwrite, destination=destination
        )


def write_page(options: ReadOptions, make: Callable[[], Page]) -> None:
    """Write the page that ``make`` gives, whole or not at all.

    Raises:
        ReshardError: it cannot be written.
    """
    if options.html is not None:
        from reshard.html import document

        document.write(make(), Path(options.html), overwrite=options.overwrite)
