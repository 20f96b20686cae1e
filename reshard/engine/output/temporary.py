"""Temporary local directories that no interrupt leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from reshard.system import signals


@contextmanager
def temporary(prefix: str = "reshard-") -> Iterator[str]:
    """Yield a temporary directory; its creation and its removal cannot be interrupted."""
    with signals.deferred():
        directory = TemporaryDirectory(prefix=prefix)
    try:
        yield directory.name
    finally:
        with signals.deferred():
            directory.cleanup()
