"""A directory of this machine for what a run needs meanwhile; it goes where the run ends."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from reshard import signals

signals.undivided(TemporaryDirectory.__init__)
signals.undivided(TemporaryDirectory.cleanup)


def temporary(prefix: str = "reshard-") -> TemporaryDirectory[str]:
    """For the block of a `with`; no interrupt leaves it there."""
    return TemporaryDirectory(prefix=prefix)
