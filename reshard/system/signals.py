"""Signals that end a program: Ctrl-C, SIGTERM, SIGHUP.

While a command only reads and plans, the first of them raises KeyboardInterrupt at once (`raised`).
Code that has something to clean up (an unfinished output, threads, a child process) runs in a
block of `checked`: a signal is only recorded there, and `check`, called between two pieces of work,
raises it. So no interrupt comes between two steps of a cleanup. In a block of `deferred`, for
steps that belong together, `check` waits too.

Python runs handlers in the main thread only. In other threads, all of this does nothing.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, "FrameType | None"], object]


class _Recorder:
    """The handler of all ending signals while a block of `checked` or `deferred` is open."""

    def __init__(self) -> None:
        self.blocks = 0  # open blocks of both kinds
        self.deferrals = 0  # open blocks of `deferred`
        self.recorded: list[int] = []  # numbers of the signals that came since
        self._replaced: dict[int, Handler] = {}
        self._has_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.blocks:  # the block has ended, and `uninstall` is still running
            self._replaced[number](number, frame)
        elif not self._has_raised:  # the cleanup after an interrupt is not interrupted
            self.recorded.append(number)

    def install(self) -> None:
        """Replace the handlers, except where a signal is ignored or has no handler."""
        self._has_raised = False
        self.recorded.clear()
        for number in ENDING:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not self:
                self._replaced[number] = handler
                signal.signal(number, self)

    def uninstall(self) -> None:
        """Put the handlers back, except where a handler itself was replaced in the meantime."""
        for number, handler in self._replaced.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)

    def run_handlers(self) -> None:
        while self.recorded:
            number = self.recorded.pop(0)
            try:
                self._replaced[number](number, None)
            except BaseException:
                self._has_raised = True
                self.recorded.clear()
                raise


class _Interrupts:
    """The handlers of `raised`: the first signal raises KeyboardInterrupt, later ones are ignored.

    Python drops an exception that is raised in a finalizer. The next block of `checked` or
    `deferred`, or the end of the program, then raises it again.
    """

    def __init__(self) -> None:
        self.is_dropped = False
        self.messages: list[str] = []
        self._numbers: list[signal.Signals] = []

    def install(self) -> None:
        """Handle the signals that are not ignored; `nohup`, for example, ignores SIGHUP."""
        self.is_dropped, self.messages = False, []
        self._numbers = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]
        self._handle(self._raise)

    def uninstall(self) -> None:
        """Let signals end the program by themselves, unless one has already interrupted it."""
        if all(signal.getsignal(number) == self._raise for number in self._numbers):
            self._handle(signal.SIG_DFL)

    def raise_dropped(self) -> None:
        if self.is_dropped:
            self._raise(0, None)

    def show_unraisable(self, dropped: UnraisableHookArgs) -> None:
        """Note a dropped interrupt; show other exceptions as Python does."""
        if dropped.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(dropped)
            return
        # `_raise` has made the process ignore signals; as its interrupt was
        # lost, another one may come.
        self.is_dropped = True
        self._handle(self._raise)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        self.is_dropped = False
        self._handle(signal.SIG_IGN)
        raise KeyboardInterrupt(*self.messages)

    def _handle(self, handler: Handler | signal.Handlers) -> None:
        for number in self._numbers:
            signal.signal(number, handler)


_recorder = _Recorder()
_interrupts = _Interrupts()


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """In the block, the first signal that ends a program raises KeyboardInterrupt.

    Later ones are ignored, so that they do not end the cleanup. Signals that were ignored before
    stay ignored. After the block, a signal ends the program in the default way.
    """
    hook, sys.unraisablehook = sys.unraisablehook, _interrupts.show_unraisable
    _interrupts.install()
    try:
        yield
        _interrupts.raise_dropped()
    finally:
        _interrupts.uninstall()
        sys.unraisablehook = hook


def add_message(text: str) -> None:
    """Add a text to the message of every later interrupt of `raised`."""
    _interrupts.messages.append(text)


def _is_main_thread() -> bool:
    # `current_thread` would leave an object behind for every thread that `threads` starts.
    return threading.get_ident() == threading.main_thread().ident


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """In the block, handlers of the signals that end a program run only when `check` is called.

    They run at the end of the outermost block at the latest, unless the block raises an error.
    """
    if not _is_main_thread():
        yield
        return
    if not _recorder.blocks:
        _interrupts.raise_dropped()
        _recorder.install()
    _recorder.blocks += 1
    try:
        yield
    finally:
        _recorder.blocks -= 1
        if not _recorder.blocks:
            _recorder.uninstall()
    if not _recorder.blocks:
        _recorder.run_handlers()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Open a block of `checked` in which `check` does nothing.

    A signal mask would not do: the system would give the signal to another thread, and Python
    would still run the handler in this one.
    """
    if not _is_main_thread():
        yield
        return
    with checked():
        _recorder.deferrals += 1
        try:
            yield
        finally:
            _recorder.deferrals -= 1


def ignore() -> None:
    """Ignore signals that end the program from now on, and those that wait for `check`."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    _recorder.recorded.clear()


def check() -> None:
    """Run the handlers that wait for this call: after a Ctrl-C, raise KeyboardInterrupt."""
    if not _recorder.recorded or _recorder.deferrals:
        return
    if _is_main_thread():
        _recorder.run_handlers()
