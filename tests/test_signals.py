"""An interrupt that Python drops, because it came while an object was finalized, comes again."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time, types, threading, weakref
from reshard import signals

dropped = threading.Event()
signals.time = types.SimpleNamespace(sleep=lambda _: dropped.wait())  # no sooner than it is seen

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        sum(range(10))  # where the handler runs

class Referred:
    pass

def called_back(_):
    Finalized.__del__(None)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    with signals.raised():
        if sys.argv[2] == "finalizer":
            Finalized()
        else:
            it = Referred()
            kept = weakref.ref(it, called_back)
            del it
        print("dropped", flush=True)
        if sys.argv[3] == "sleep":
            dropped.set()
        if sys.argv[3] == "deferred":
            with signals.deferred():
                print("half-way", flush=True)
        elif sys.argv[3] == "sleep":
            time.sleep(60)
        print("ended")
except KeyboardInterrupt:
    ignored = [n.name for n in signals.ENDING if signal.getsignal(n) == signal.SIG_IGN]
    print("raised", *ignored)
"""


def lines(number: int, where: str, then: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), where, then],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["finalizer", "callback"])
@pytest.mark.parametrize("then", ["sleep", "deferred"])
def test_an_interrupt_that_is_dropped_comes_again(number, where, then):
    assert lines(number, where, then) == ["dropped", "raised SIGINT SIGTERM SIGHUP"]


def test_a_signal_that_was_ignored_stays_so():
    assert lines(signal.SIGHUP, "finalizer", "end") == ["dropped", "ended"]


def test_what_else_is_dropped_is_shown():
    program = (
        "from reshard import signals\nclass X:\n def __del__(self): raise ValueError('told')\n"
    )
    program += "with signals.raised(): X()"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ValueError: told" in ended.stderr
