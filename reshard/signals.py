"""Signals that end a program: they interrupt it, but not in a step that must not stay half-way.

Python runs a handler between any two steps of the main thread: also where a `with` has been entered
and its block has not, where a lock is taken and nobody knows it yet, in what cleans up. There the
interrupt waits, see `undivided`, or comes again if Python drops it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SOON = 0.01  # seconds until an interrupt that was dropped, or has to wait, comes again
_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib takes longer to import
_NAMES = ("contextlib.py", "threading.py", "weakref.py", "_weakrefset.py", "concurrent/futures/")
_DELICATE = tuple(f"{_LIBRARY}/{name}" for name in _NAMES)
_WAITING = threading.Condition.wait.__code__  # where they may wait long, and leave it well
_undivided: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., Any])


def undivided(function: F) -> F:
    """A function that no interrupt of `raised` divides, nor what it calls; not ours alone."""
    _undivided.add(function.__code__)
    return function


class _Interrupted(KeyboardInterrupt):
    def __init__(self, number: int, *said: str) -> None:
        super().__init__(*said)
        self.number = number


class _Handler:
    """Raises the first signal that comes, and again if Python drops what was raised."""

    def __init__(self) -> None:
        self._heeded: list[signal.Signals] = []
        self._dropped: int | None = None
        self._said: tuple[str, ...] = ()

    def heed(self) -> None:
        self._said = ()
        self._heeded = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]
        self._listen()

    def say(self, what: str) -> None:
        """Nobody hears it where nothing is raised."""
        if self._heeded:
            self._said = (*self._said, what)

    def unraisable(self, dropped: UnraisableHookArgs) -> None:
        """A `sys.unraisablehook`: it runs in the finalizer, where it cannot raise either."""
        if not isinstance(dropped.exc_value, _Interrupted):
            sys.__unraisablehook__(dropped)
            return
        self._listen()
        self._wait(dropped.exc_value.number)

    def raise_dropped(self) -> None:
        """Raise at once what comes again otherwise."""
        if self._dropped is not None:
            self._raise(self._dropped, sys._getframe())  # noqa: SLF001 - there is no other way

    def end(self) -> None:
        """From now on a signal ends the program as it ends any; after one, they stay ignored."""
        then = signal.SIG_DFL if self._dropped is None else signal.SIG_IGN
        for number in self._heeded:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, then)
        self._heeded = []

    def _listen(self) -> None:
        for number in self._heeded:
            signal.signal(number, self._raise)

    def _wait(self, number: int) -> None:
        self._dropped = number
        start_new_thread(_signal_soon, (number,))  # a Thread takes locks that may be taken

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if _is_delicate(frame):
            self._wait(number)
            return
        self._dropped = None
        for each in self._heeded:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number, *self._said)


def _signal_soon(number: int) -> None:
    time.sleep(_SOON)
    os.kill(os.getpid(), number)


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether locks, threads or clean-up would stay half-way if it were interrupted here."""
    if frame is None:
        return False
    code = frame.f_code
    if code.co_filename.startswith(_DELICATE) and code is not _WAITING:
        return True
    outer: FrameType | None = frame
    while outer is not None and outer.f_code not in _undivided:
        outer = outer.f_back
    return outer is not None


_handler = _Handler()


def say(what: str) -> None:
    """What an interrupt of `raised` is to say too, from now on."""
    _handler.say(what)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """In the block, the first signal that ends a program raises KeyboardInterrupt.

    Those after it are ignored: they must not end the cleaning-up. What was ignored before, as
    nohup leaves SIGHUP, stays so. Python drops what is raised while it finalizes an object: then
    it is raised once more, before a `deferred` step at the latest. After the block, a signal ends
    the program as it ends any.
    """
    hook, sys.unraisablehook = sys.unraisablehook, _handler.unraisable
    _handler.heed()
    try:
        yield
        _handler.raise_dropped()
    finally:
        _handler.end()
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
        ours[signal.Signals(call[0])](call[0], sys._getframe())  # noqa: SLF001 - where it is now
