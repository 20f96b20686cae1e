"""Signs of life between the ranks of a launcher, and what the one that failed has said.

Every rank beats once a second on torch's key-value store. The first listens to all, the others to
the first: what it learns, it passes on.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from reshard.errors import INTERRUPTED, ReshardError, is_outside
from reshard.ranks.team import Progress

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_BEAT = 1.0  # seconds between two signs of life
_STEP = 0.02


class RetoldError(ReshardError):
    """What another rank raised, as it told it."""


def tell(store: Store, where: str, failure: BaseException) -> None:
    """Say why this rank fails; of several ranks the first that does is heard."""
    told = {"where": where, "problem": repr(failure), "remedy": "", "code": 70}
    if isinstance(failure, ReshardError):
        if not isinstance(failure, RetoldError):
            told["where"] = f"{where}: {failure.where}"
        else:
            told["where"] = failure.where
        told |= {"problem": failure.problem, "remedy": failure.remedy, "code": failure.exit_code}
    elif isinstance(failure, KeyboardInterrupt):
        told |= {"problem": "was interrupted", "code": INTERRUPTED}
    store.compare_set("failed", "", json.dumps({**told, "outside": is_outside(failure)}))


def said(store: Store) -> ReshardError | None:
    """What the rank said that failed first."""
    if not store.check(["failed"]):
        return None
    told: dict[str, Any] = json.loads(store.get("failed"))
    error = RetoldError(told["where"], told["problem"], told["remedy"])
    error.exit_code = told["code"]
    if told["outside"]:
        error.__cause__ = OSError("of another rank")
    return error


def gone(where: str, what: str) -> ReshardError:
    """Something that is not there any more, and may be another time."""
    error = ReshardError(where, what, "run the same command again")
    error.__cause__ = ConnectionError(what)
    return error


def dead(store: Store, ranks: Sequence[int], what: str) -> ReshardError:
    """Ranks that will say nothing any more."""
    shown = ", ".join(
        f"{rank} ({store.get(f'host/{rank}').decode()})"
        if store.check([f"host/{rank}"])
        else f"{rank}"
        for rank in ranks[:4]
    )
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return gone(
        f"rank {shown}{more}",
        f"{what}: killed, or its machine is gone; the run ends",
    )


class Watch(threading.Thread):
    """Says that this rank lives, and interrupts it when another one failed or fell silent.

    Args:
        patience: seconds without a sign of life, and a rank is taken for dead.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        super().__init__(name="reshard-ranks", daemon=True)
        self.shown: Progress | None = None
        self.failure: ReshardError | None = None
        self.interrupts = False
        self._store = store
        self._rank = rank
        self._heard = range(1, size) if rank == 0 else range(1)
        self._patience = patience
        self._done = 0
        self._elsewhere = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def count(self, nbytes: int) -> None:
        """Add to the bytes that this rank has done."""
        with self._lock:
            self._done += nbytes
            if self._rank == 0 and self.shown:
                self.shown(nbytes)

    def check(self) -> None:
        """Raise what ended the others."""
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Fall silent."""
        self._stopped.set()
        if self.is_alive():
            self.join(_BEAT)

    def run(self) -> None:
        """A beat a second, until stopped."""
        beats, last = 0, dict.fromkeys(self._heard, ("", time.monotonic()))
        while not self._stopped.is_set():
            beats += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{beats} {self._done}")
                self.failure = said(self._store) or self._listen(last)
            except RuntimeError:
                self.failure = gone("rank 0", "its machine is not there any more")
            while self.failure is not None and not self._stopped.is_set():
                if self.interrupts:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                self._stopped.wait(_STEP)
            self._stopped.wait(_BEAT)

    def _listen(self, last: dict[int, tuple[str, float]]) -> ReshardError | None:
        now = time.monotonic()
        for rank in self._heard:
            key = f"beat/{rank}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if beat != last[rank][0]:
                last[rank] = beat, now
        self._show([beat for beat, _ in last.values()])
        silent = [rank for rank, (_, when) in last.items() if now - when > self._patience]
        what = f"has not been heard of for {self._patience:.0f} s"
        return dead(self._store, silent, what) if silent else None

    def _show(self, beats: Iterable[str]) -> None:
        """Add what the other ranks have done to the first one's display."""
        if self._rank != 0 or self.shown is None:
            return
        elsewhere = sum(int(beat.split()[1]) for beat in beats if beat)
        with self._lock:
            self.shown(elsewhere - self._elsewhere)
        self._elsewhere = elsewhere
