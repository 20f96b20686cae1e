"""Threads end with their block, in whatever way they end."""

from __future__ import annotations

import _thread
import os
import threading
import time

import pytest

from reshard.system import threads as threads_module
from reshard.system.threads import ThreadGroup, count_cores, map_files, parallel_for

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


@pytest.mark.parametrize(
    ("machine", "usable", "ranks", "each"),
    [(64, 64, 8, 8), (64, 8, 8, 8), (64, 2, 1, 2), (4, 4, 8, 1)],
)
def test_ranks_share_the_cores_of_a_machine(machine, usable, ranks, each, monkeypatch):
    """Also where a launcher has bound each rank to cores of its own."""
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)), raising=False)
    assert count_cores(ranks) == each


@pytest.fixture(autouse=True)
def _forget_waits(monkeypatch):
    monkeypatch.setattr(threads_module._Waits, "known_until", 0.0)


def test_files_of_a_local_disk_are_read_without_threads(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # no call waits
    threads = map_files(range(100), lambda _number: threading.get_ident())
    assert set(threads) == {threading.get_ident()}


def test_files_that_wait_for_a_network_are_read_in_threads():
    def read(number):
        time.sleep(0.005)
        return number, threading.get_ident()

    results = map_files(range(40), read)
    assert [number for number, _ in results] == list(range(40))
    assert len({thread for _, thread in results}) > 1
    assert threading.get_ident() not in {thread for _, thread in map_files(range(2), read)}


def test_files_are_read_without_threads_where_the_system_has_none(monkeypatch):
    map_files([0.005], time.sleep)  # from now on, threads are tried

    def refuse(*_arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert map_files(range(5), lambda number: number * 2) == [0, 2, 4, 6, 8]


def test_files_are_measured_again_after_a_moment(monkeypatch):
    """One wait of a busy machine must not cost a long process all later reads."""
    now = time.monotonic()
    map_files([0.005], time.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now + 3)
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # no call waits
    assert set(map_files(range(9), lambda _: threading.get_ident())) == {threading.get_ident()}


def test_the_error_of_the_first_damaged_file_is_raised():
    """Also if a thread has reported the error of a later file before."""
    read = []

    def fail(number):
        time.sleep(0.01 if number in (0, 5) else 0.001)
        read.append(number)
        if number >= 5:
            raise ValueError(number)

    with pytest.raises(ValueError, match=r"^5$"):
        map_files(range(1000), fail)
    assert len(read) < 100
