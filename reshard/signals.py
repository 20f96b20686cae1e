"""Signals that wait while a step is taken that must not be left half-way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Handlers of the signals that end a program run after the block, not in it.

    A mask would not do: the signal would go to another thread, and the handler runs in this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in ENDING}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in ours:
            signal.signal(number, lambda *call: came.append(call))
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    for call in came[:1]:
        ours[signal.Signals(call[0])](*call)
