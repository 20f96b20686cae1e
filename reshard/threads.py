"""Threads that share a list of work, or do one thing beside it; none outlives its block.

A signal interrupts the waiting for them, never the ending of them: what raises in
`threading.Thread.join`, or where an executor lets go of its locks, leaves threads that nobody waits
for, or that wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from reshard import signals

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
R = TypeVar("R")
_Ended = tuple[str, "BaseException | None"]


class Crew:
    """Threads that are waited for where the block ends, however it does.

    What they wait for themselves must have been told to end by then.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._ended: SimpleQueue[_Ended] = SimpleQueue()  # in C: a signal leaves it whole

    def __enter__(self) -> Self:
        return self

    @signals.undivided
    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    @signals.undivided
    def start(self, act: Callable[[], object], name: str = "worker") -> None:
        """Begin to do something."""
        thread = threading.Thread(target=self._run, args=(act, name), name=name)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> str:
        """Wait until one more has ended; its name, or what it raised."""
        name, error = self._ended.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it holds its own traceback
        return name

    def _run(self, act: Callable[[], object], name: str) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._ended.put((name, error))
        else:
            self._ended.put((name, None))


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

    with Crew() as crew:
        try:
            for _ in range(workers):
                crew.start(loop)
            for _ in range(workers):
                crew.wait()
        finally:
            stopped = True


def each(items: Iterable[T], act: Callable[[T], R], most: int) -> list[R]:
    """What comes of every item, in their order; as many are done at once as there may be."""
    waiting = list(items)
    come: dict[int, R] = {}

    def act_on(number: int) -> None:
        come[number] = act(waiting[number])

    spread(range(len(waiting)), lambda: act_on, max(min(most, len(waiting)), 1))
    return [come[number] for number in range(len(waiting))]
