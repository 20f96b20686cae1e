"""Ranks that native code ended: what starts ranks starts them once more then, and says so.

gloo's own threads crash once in thousands of process groups (torch 2.13, seen under load).
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterable

_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def crashed(exits: Iterable[int | None]) -> bool:
    """Whether one of these exit codes is of a crash, so not of a fault of Python code."""
    return not _SIGNALS.isdisjoint(exits)


def tell(what: str) -> None:
    """A warning that pytest shows and does not raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(what, stacklevel=3)
