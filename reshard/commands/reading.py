"""What every command that reads tensors shares: which source, whether to trust it, the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from reshard import formats
from reshard.commands.options import ReadOptions
from reshard.errors import UnsafeError
from reshard.manifest import Manifest
from reshard.ranks.team import Progress, ignore_progress

Meter = Callable[[int], AbstractContextManager[Progress]]


def metered(meter: Meter | None, nbytes: int) -> AbstractContextManager[Progress]:
    """A progress display for a number of bytes; for nobody where there is no meter."""
    return meter(nbytes) if meter else nullcontext(ignore_progress)


def trusted(sources: Sequence[Path], options: ReadOptions) -> Manifest:
    """The checkpoint that is asked for, once it is known to be safe.

    Raises:
        ReshardError: it cannot be read or trusted.
    """
    manifest = formats.read(sources, **options.reader_arguments())
    check_trust(manifest, options.allow_pickle)
    return manifest


def check_trust(manifest: Manifest, allowed: Sequence[str]) -> None:
    """Refuse a source whose pickles name classes that nobody knows.

    Raises:
        UnsafeError: naming them.
    """
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    if refused:
        raise UnsafeError(
            manifest.origin.path,
            f"its pickles name {', '.join(refused)}, which no known framework writes",
            "if they are your own classes, go on with "
            + " ".join(f"--allow-pickle {name}" for name in refused)
            + " (they are never executed either way)",
        )
