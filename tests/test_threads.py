"""Threads end with their block, in whatever way they end."""

from __future__ import annotations

import _thread

import pytest

from reshard.threads import ThreadGroup, parallel_for

start = _thread.start_new_thread


def test_a_thread_without_memory_for_its_first_line_is_noticed(monkeypatch):
    """CPython's own `threading.Thread.start` would wait for it without end."""
    started = []

    def start_every_other(run, arguments):
        started.append(run)
        return start(run if len(started) % 2 else lambda *_held: None, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start_every_other)
    seen = []
    with pytest.raises(MemoryError, match="not enough memory to start"):
        parallel_for(range(10), lambda: seen.append, 4)
    assert sorted(seen) == list(range(10))


def test_a_thread_that_cannot_say_that_it_ended_is_noticed(monkeypatch):
    def run(*_arguments):
        raise MemoryError

    monkeypatch.setattr(ThreadGroup, "_run", run)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    with pytest.raises(MemoryError, match="not enough memory to start"):
        parallel_for(range(10), lambda: print, 4)


def test_the_first_error_of_a_thread_is_raised():
    def fail(item):
        raise KeyError(item)

    with pytest.raises(KeyError):
        parallel_for(range(10), lambda: fail, 4)
