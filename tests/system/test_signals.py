"""Signals raise at once, at a check, or after a block; a dropped interrupt comes again."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.programs import LIMIT_S, run_python

BEGIN = """
import os, signal, sys, time, weakref
from reshard.system import signals

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        sum(range(10))  # the handler runs here

class Referred:
    pass

def finalize(_=None):
    Finalized.__del__(None)

def send():
    os.kill(os.getpid(), int(sys.argv[1]))

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    with signals.raised():
"""
END = """
except KeyboardInterrupt as interrupt:
    ignored = [n.name for n in signals.ENDING if signal.getsignal(n) == signal.SIG_IGN]
    print("raised", *interrupt.args, *ignored)
"""
IGNORED = "raised SIGINT SIGTERM SIGHUP"


def lines(number: int, block: str) -> list[str]:
    indented = "".join(f"        {line}\n" for line in block.strip().splitlines())
    ended = run_python("-c", BEGIN + indented + END, int(number), timeout=LIMIT_S, check=True)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


DROP = {
    "finalizer": "Finalized()",
    "callback": "referred = Referred(); kept = weakref.ref(referred, finalize); del referred",
}
AFTER = {
    "checked": "with signals.checked(): print('owned')",
    "deferred": "with signals.deferred(): print('owned')",
    "end": "pass",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", DROP)
@pytest.mark.parametrize("after", AFTER)
def test_an_interrupt_that_is_dropped_comes_again(number, where, after):
    block = f"{DROP[where]}\nprint('dropped')\n{AFTER[after]}"
    assert lines(number, block) == ["dropped", IGNORED]


def test_a_signal_that_was_ignored_stays_so():
    assert lines(signal.SIGHUP, "send()\nprint('ended')") == ["ended"]


def test_other_exceptions_that_are_dropped_are_shown():
    program = "from reshard.system import signals\nclass X:\n"
    program += " def __del__(self): raise ValueError('told')\nwith signals.raised(): X()"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ValueError: told" in ended.stderr


def test_a_checked_block_is_interrupted_at_a_check():
    block = """
with signals.checked():
    send()
    print("after the signal")
    with signals.deferred():
        signals.check()
        print("after a check that waits")
    print("after the step")
    try:
        signals.check()
    finally:
        send()
        signals.check()
        print("cleaned up")
"""
    said = ["after the signal", "after a check that waits", "after the step", "cleaned up", IGNORED]
    assert lines(signal.SIGTERM, block) == said


def test_a_block_without_a_check_is_interrupted_at_its_end():
    block = "with signals.checked():\n    send()\n    print('done')\nprint('never')"
    assert lines(signal.SIGINT, block) == ["done", IGNORED]


def test_an_error_of_a_block_is_not_replaced_by_an_interrupt():
    block = """
try:
    with signals.checked():
        send()
        raise ValueError("the disk is full")
except ValueError as error:
    print(error)
"""
    assert lines(signal.SIGINT, block) == ["the disk is full"]


def test_an_interrupt_says_what_was_written():
    block = "signals.add_message('x was written')\nsend()\ntime.sleep(60)"
    assert lines(signal.SIGINT, block) == [IGNORED.replace("raised", "raised x was written")]


def test_handlers_of_a_program_that_uses_reshard_run_at_a_check_too():
    program = """
import os, signal
from reshard.system import signals
came = []
signal.signal(signal.SIGTERM, lambda *call: came.append(call))
with signals.checked():
    os.kill(os.getpid(), signal.SIGTERM)
    print(len(came))
    signals.check()
    print(len(came))
os.kill(os.getpid(), signal.SIGTERM)
print(len(came))
"""
    ended = run_python("-c", program, check=True)
    assert ended.stdout.split() == ["0", "1", "2"]
