"""Threads that process a list of items or run one task in the background; none outlives its block.

A signal interrupts the wait for a result, never a start or the final join (`signals.checked`).
"""

from __future__ import annotations

import _thread
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from reshard.system import signals

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")

_STOP_SECONDS = 5.0  # to wait for a call that may hang, such as a request to a dead machine
_CHECK_SECONDS = 0.1  # between two looks for a signal while the main thread waits
_LONG_WAIT = 0.002  # seconds; files of a local disk that are cached take a tenth of that
_MUCH = 4  # times; on a busy machine, a thread also waits for a core
_MOST_TIMED = 64  # files whose time is measured together
_READERS = 64  # threads that wait for a file system or an object store
_KNOWN_SECONDS = 2.0  # a busy machine may look like a network, and threads then cost time
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)


class ThreadGroup:
    """Threads that are joined when the `with` block ends, also after an error.

    Before the block ends, the caller must release everything that the threads wait for.
    """

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._ended: SimpleQueue[tuple[str, BaseException | None]] = SimpleQueue()
        self._signals = signals.checked()

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.join()
        self._signals.__exit__(*cast("tuple[Any, Any, Any]", error))

    def start(self, act: Callable[[], object], name: str = "worker") -> None:
        """Start a thread that calls `act`.

        Raises:
            MemoryError: the system gives no more threads, or no memory for one.
        """
        try:
            thread = _Thread(lambda: self._run(act, name))
        except RuntimeError as error:  # "can't start new thread", whatever the reason is
            raise MemoryError(f"the system cannot start more threads: {error}") from error
        self._threads.append(thread)

    def wait(self) -> str:
        """Wait until one more thread ends and return its name, or raise what it raised.

        Raises:
            MemoryError: a thread ended without a result, because it had no memory to run.
        """
        name, error = self._take_ended()
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the reference cycle between the error and its traceback
        return name

    def _take_ended(self) -> tuple[str, BaseException | None]:
        while True:
            signals.check()
            # Before the queue is read: a thread that has ended by now has put its result there.
            all_ended = not any(thread.is_alive for thread in self._threads)
            try:
                return self._ended.get(timeout=0 if all_ended else _CHECK_SECONDS)
            except Empty:
                if all_ended:
                    raise MemoryError("there was not enough memory to start a thread") from None

    def _run(self, act: Callable[[], object], name: str) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._ended.put((name, error))
        else:
            self._ended.put((name, None))


class _Thread:
    """A thread whose end is noticed even if it dies before it runs its first line of Python.

    `threading.Thread.start` waits until the thread signals that it runs. A thread that gets no
    memory for its first frame never signals it, and `start` never returns (CPython 3.11 to 3.14
    ``Lib/threading.py``).
    """

    def __init__(self, run: Callable[[], object]) -> None:
        ended = threading.Lock()
        ended.acquire()
        token = _Token()
        self._token, self._ended = weakref.ref(token), ended
        _thread.start_new_thread(_run_and_release, (run, ended, token))

    @property
    def is_alive(self) -> bool:
        return self._token() is not None

    def join(self) -> None:
        # A thread that dies before its first line of Python never releases the lock.
        while self.is_alive and not self._ended.acquire(timeout=_CHECK_SECONDS):
            pass


class _Token:
    """An object that only the thread refers to; it is gone once the thread has ended."""

    __slots__ = ("__weakref__",)


def _run_and_release(run: Callable[[], object], ended: threading.Lock, _token: _Token) -> None:
    try:
        run()
    finally:
        ended.release()


def parallel_for(
    items: Iterable[T],
    make: Callable[[], Callable[[T], Any]],
    workers: int,
    done: Callable[[T], None] = lambda _item: None,
) -> None:
    """Process every item in one of `workers` threads; one worker runs as a plain loop.

    Args:
        items: consumed one at a time, under a lock; none of them is None.
        make: called once in each thread; returns the function that processes its items, so that
            each thread can have buffers of its own.
        done: called after each item, under the same lock.
    """
    if workers == 1:
        run = make()
        for item in items:
            signals.check()
            run(item)
            done(item)
        return
    waiting = iter(items)
    lock = threading.Lock()
    stopped = False

    def loop() -> None:
        run = make()
        while not stopped:
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            run(item)
            with lock:
                done(item)

    with ThreadGroup() as threads:
        try:
            for _ in range(workers):
                threads.start(loop)
            for _ in range(workers):
                threads.wait()
        finally:  # after an error, the other threads end with the item at hand
            stopped = True


def parallel_map(items: Iterable[T], act: Callable[[T], R], most: int) -> list[R]:
    """Return `act` of every item, in order, computed by at most `most` threads."""
    waiting = list(items)
    results: dict[int, R] = {}

    def act_on(number: int) -> None:
        results[number] = act(waiting[number])

    parallel_for(range(len(waiting)), lambda: act_on, max(min(most, len(waiting)), 1))
    return [results[number] for number in range(len(waiting))]


class _Waits:
    known_until = 0.0  # seconds of `time.monotonic`; until then, files are known to wait


def start_measuring() -> Callable[[], tuple[float, float]]:
    """Begin to measure this thread.

    Returns:
        A function: -> the seconds since then in which the thread waited, and in which it computed.
        A thread that did not give up its core waited for nothing but a core: for 0 seconds.
    """
    started, (cpu_before, waits_before) = time.perf_counter(), _read_usage()

    def measure() -> tuple[float, float]:
        passed, (cpu, waits) = time.perf_counter() - started, _read_usage()
        computed = cpu - cpu_before
        return passed - computed if waits > waits_before else 0.0, computed

    return measure


def _read_usage() -> tuple[float, int]:
    """Return the CPU seconds of this thread, and how often it gave up its core to wait."""
    if _THREAD is None:  # macOS does not count the waits of one thread: those of all are more
        return time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    usage = resource.getrusage(_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_nvcsw


def are_files_slow() -> bool:
    """Return whether `map_files` found, in the last seconds, that reads wait."""
    return time.monotonic() < _Waits.known_until


def map_files(items: Iterable[T], act: Callable[[T], R]) -> list[R]:
    """Return `act` of every item, in order, where `act` reads the structure of a file.

    On a network, opening a file takes several round trips. So once calls have waited much longer
    than they compute, threads make the remaining ones; for the next two seconds, calls for other
    lists begin with threads. Local files are read faster without threads.

    Raises:
        Exception: what `act` raises for the first of the items for which it raises an error.
    """
    waiting = list(items)
    results: list[R] = []
    waited = computed = 0.0
    while len(results) < len(waiting) and not are_files_slow():
        start = len(results)
        measure = start_measuring()
        results += map(act, waiting[start : start + min(start + 1, _MOST_TIMED)])
        more_waited, more_computed = measure()
        waited, computed = waited + more_waited, computed + more_computed
        if waited >= max(_LONG_WAIT, _MUCH * computed):
            _Waits.known_until = time.monotonic() + _KNOWN_SECONDS
    errors: dict[int, Exception] = {}

    def attempt(number: int) -> R | None:
        # Items are taken in order, so every item before one with an error is attempted too.
        if not errors:
            try:
                return act(waiting[number])
            except Exception as error:  # noqa: BLE001 - raised again below
                errors[number] = error
        return None

    left = range(len(results), len(waiting))
    try:
        rest = parallel_map(left, attempt, _READERS)
    except MemoryError:  # the system limits the threads of a user or a job
        rest = list(map(attempt, left))
    if errors:
        raise errors[min(errors)]
    return [*results, *cast("list[R]", rest)]


def map_files_by_key(files: Mapping[K, T], act: Callable[[T], R]) -> dict[K, R]:
    """Return `act` of every value by its key, in order; see `map_files`."""
    return dict(zip(files, map_files(files.values(), act), strict=True))


def repeat(act: Callable[[], bool], seconds: float, name: str) -> Callable[[], None]:
    """Call `act` every `seconds` in a background thread, until it returns False.

    Returns:
        A function that stops the thread, and waits a few seconds for a call at work.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(seconds) and act():
            pass

    def stop() -> None:
        stopped.set()
        thread.join(_STOP_SECONDS)

    # As a daemon, a call that hangs does not keep the process from ending.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return stop


def count_cores(processes: int = 1) -> int:
    """Return the number of cores for each of several processes on this machine, at least 1.

    A process never gets more cores than it may use. A launcher may have bound each of them to cores
    of its own, so the machine's cores are divided, not those that this process may use.
    """
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return min(usable, max(cores // processes, 1))
