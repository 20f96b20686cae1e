"""Signals that end a program: they interrupt it, but not in a step that must not stay half-way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SOON = 0.01  # seconds until an interrupt that was dropped comes again


class _Interrupted(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Handler:
    """Raises the first signal that comes, and again if Python drops what was raised."""

    def __init__(self) -> None:
        self._heeded: list[signal.Signals] = []
        self._dropped: int | None = None

    def heed(self) -> None:
        self._heeded = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]
        self._listen()

    def unraisable(self, dropped: UnraisableHookArgs) -> None:
        """A `sys.unraisablehook`: it runs in the finalizer, where it cannot raise either."""
        if not isinstance(dropped.exc_value, _Interrupted):
            sys.__unraisablehook__(dropped)
            return
        self._dropped = dropped.exc_value.number
        self._listen()
        start_new_thread(_signal_soon, (self._dropped,))  # a Thread takes locks that may be taken

    def raise_dropped(self) -> None:
        """Raise at once what comes again otherwise."""
        if self._dropped is not None:
            self._raise(self._dropped)

    def _listen(self) -> None:
        for number in self._heeded:
            signal.signal(number, self._raise)

    def _raise(self, number: int, _frame: FrameType | None = None) -> NoReturn:
        self._dropped = None
        for each in self._heeded:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)


def _signal_soon(number: int) -> None:
    time.sleep(_SOON)
    os.kill(os.getpid(), number)


_handler = _Handler()


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """In the block, the first signal that ends a program raises KeyboardInterrupt.

    Those after it are ignored: they must not end the cleaning-up. What was ignored before, as
    nohup leaves SIGHUP, stays so. Python drops what is raised while it finalizes an object: then
    it is raised once more, before a `deferred` step at the latest.
    """
    hook, sys.unraisablehook = sys.unraisablehook, _handler.unraisable
    _handler.heed()
    try:
        yield
    finally:
        sys.unraisablehook = hook


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Handlers of the signals that end a program run before the block or after it, not in it.

    A mask would not do: the signal would go to another thread, and the handler runs in this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    _handler.raise_dropped()
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
