"""Opening a source that a command reads tensors from: trust in its pickles, and progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from reshard import formats
from reshard.commands.output_options import ReadOptions
from reshard.core.manifest import Manifest
from reshard.errors import UnsafeError
from reshard.model import ModelShapes
from reshard.system.ranks.team import Progress, ignore_progress

Meter = Callable[[int], AbstractContextManager[Progress]]  # opens a display for a number of bytes


def open_progress(meter: Meter | None, nbytes: int) -> AbstractContextManager[Progress]:
    """Open a progress display for a number of bytes; without a meter, it shows nothing."""
    return meter(nbytes) if meter else nullcontext(ignore_progress)


def read_trusted(
    sources: Sequence[Path], options: ReadOptions, live: ModelShapes | None = None
) -> Manifest:
    """Read the manifest of a checkpoint and check that its pickles are safe."""
    manifest = formats.read(sources, **options.reader_arguments(), live=live)
    check_trust(manifest, options.allow_pickle)
    return manifest


def check_trust(manifest: Manifest, allowed: Sequence[str]) -> None:
    """Refuse a source whose pickles name unknown classes that the user does not allow.

    Raises:
        UnsafeError: there are such classes; the message names them.
    """
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    if refused:
        raise UnsafeError(
            manifest.origin.path,
            f"its pickles name {', '.join(refused)}, which no known framework writes",
            "if they are your own classes, pass "
            + " ".join(f"--allow-pickle {name}" for name in refused)
            + " (they are never executed either way)",
        )
