"""Temporary local directories that no interrupt leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from reshard.engine.output.local import FULL
from reshard.errors import ResourceError
from reshard.system import signals


@contextmanager
def temporary(prefix: str = "reshard-") -> Iterator[str]:
    """Yield a temporary directory; its creation and its removal cannot be interrupted.

    Raises:
        ResourceError: its disk is full.
    """
    with signals.deferred():
        directory = TemporaryDirectory(prefix=prefix)
    try:
        yield directory.name
    except OSError as error:  # those of the output's disk have a message of their own
        if error.errno not in FULL:
            raise
        raise ResourceError(
            directory.name,
            f"the disk for temporary files is full ({error.strerror})",
            "free some space, or set TMPDIR to a directory on a larger disk",
        ) from error
    finally:
        with signals.deferred():
            directory.cleanup()
