"""Temporary local directories that no interrupt leaves behind."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from reshard import signals

signals.undivided(TemporaryDirectory.__init__)
signals.undivided(TemporaryDirectory.cleanup)


def temporary(prefix: str = "reshard-") -> TemporaryDirectory[str]:
    """Return a temporary directory for a `with` block; its removal cannot be interrupted."""
    return TemporaryDirectory(prefix=prefix)
