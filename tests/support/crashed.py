"""Recognize ranks that native code killed, so that tests start them again with a warning.

gloo's own threads crash once in thousands of process groups (torch 2.13, seen under load).
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterable

_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def crashed(exits: Iterable[int | None]) -> bool:
    """Return whether one of these exit codes is of a crash in native code."""
    return not _SIGNALS.isdisjoint(exits)


def warn_of(what: str) -> None:
    """Give a warning that pytest shows and does not raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(what, stacklevel=3)
