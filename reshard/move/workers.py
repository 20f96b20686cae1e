"""Threads that share a list of work; each has buffers of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


def spread(
    items: Iterable[T],
    make: Callable[[], Callable[[T], Any]],
    workers: int,
    done: Callable[[T], None] = lambda _item: None,
) -> None:
    """Apply a worker's function to every item; one worker is a plain loop.

    ``make`` gives each thread its own function (its buffers); ``done`` runs under a lock.
    """
    if workers == 1:
        run = make()
        for item in items:
            run(item)
            done(item)
        return
    waiting = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def loop() -> None:
        run = make()
        while not stop.is_set():
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            run(item)
            with lock:
                done(item)

    with ThreadPoolExecutor(workers) as threads:
        try:
            running: list[Future[None]] = [threads.submit(loop) for _ in range(workers)]
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        finally:
            stop.set()
