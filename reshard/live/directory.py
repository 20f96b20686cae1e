"""A checkpoint directory for libraries that look for files by name and load them by a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.commands.split.options import SplitOptions
from reshard.formats.request import LiveTarget
from reshard.live.files import create_names, log_report, open_live_files, read_options
from reshard.live.patched_loads import patch_loads


@contextmanager
def open_directory(
    source: formats.Paths,
    *,
    decided: Mapping[str, Any],
    given: Mapping[str, Any],
    target: LiveTarget,
    workers: int | None,
) -> Iterator[Path]:
    """Open a directory of names, whose content the library loads from memory in this block.

    Every rank must enter the block. The report is in the log of rank 0.

    Args:
        decided: the options of `split` that the running program decides.
        given: the options of `split` that the user passed.

    Raises:
        ReshardError: on every rank, if the source cannot be read, trusted or written so.
    """
    options = SplitOptions(**read_options(given, decided))
    with open_live_files(source, options, target, workers=workers) as live:
        log_report(live.report)
        with create_names(live.files) as folder, patch_loads(live.files, folder):
            yield folder
