"""Seconds that a step spends on each activity."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timer:
    """Counts seconds by activity; the time of an inner activity is not that of the outer one.

    >>> timer = Timer()
    >>> with timer("backward"), timer("reduce"):
    ...     pass
    >>> sorted(timer.take())
    ['backward', 'reduce']
    """

    def __init__(self, *, synchronize: bool = False) -> None:
        self._seconds: dict[str, float] = {}
        self._inner = [0.0]
        self._synchronize = synchronize

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Count the block as ``activity``: forward, backward, reduce, gather or step."""
        begin = self._now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._now() - begin
            own = spent - self._inner.pop()
            self._inner[-1] += spent
            self._seconds[activity] = self._seconds.get(activity, 0.0) + own

    def take(self) -> dict[str, float]:
        """Return the seconds by activity since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
