"""Heartbeats between the ranks of a launcher, and the report of the first rank that fails.

Every rank writes a heartbeat to torch's key-value store once a second. Rank 0 watches all other
ranks. The others watch rank 0, which passes on what it learns.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reshard.errors import INTERRUPTED, ReshardError, has_external_cause
from reshard.system import threads
from reshard.system.ranks.team import Progress

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_BEAT = 1.0  # seconds between two heartbeats


class RemoteRankError(ReshardError):
    """An error that another rank raised and published in the store."""


def publish_failure(store: Store, where: str, failure: BaseException) -> None:
    """Publish why this rank fails; the store keeps the first failure that any rank publishes."""
    # 70 is the exit code of a bug, see `cli`.
    report = {"where": where, "problem": repr(failure), "remedy": "", "code": 70}
    if isinstance(failure, ReshardError):
        is_remote = isinstance(failure, RemoteRankError)  # it names the rank already
        report["where"] = failure.where if is_remote else f"{where}: {failure.where}"
        report |= {"problem": failure.problem, "remedy": failure.remedy, "code": failure.exit_code}
    elif isinstance(failure, KeyboardInterrupt):
        report |= {"problem": "was interrupted", "code": INTERRUPTED}
    # With an empty expected value, `compare_set` writes only where the key does not exist.
    store.compare_set("failed", "", json.dumps({**report, "outside": has_external_cause(failure)}))


def _read_failure(store: Store) -> ReshardError | None:
    if not store.check(["failed"]):
        return None
    report: dict[str, Any] = json.loads(store.get("failed"))
    error = RemoteRankError(report["where"], report["problem"], report["remedy"])
    error.exit_code = report["code"]
    if report["outside"]:  # `errors.has_external_cause` recognizes such errors by their cause
        error.__cause__ = OSError("of another rank")
    return error


def build_connection_error(where: str, what: str) -> ReshardError:
    """Return the error for a lost connection, after which another run may succeed."""
    error = ReshardError(where, what, "run the same command again")
    error.__cause__ = ConnectionError(what)
    return error


def build_lost_ranks_error(store: Store, ranks: Sequence[int], what: str) -> ReshardError:
    """Return the error for ranks that no longer respond; it names at most four of them."""
    names = ", ".join(
        f"{rank} ({store.get(f'host/{rank}').decode()})"
        if store.check([f"host/{rank}"])
        else f"{rank}"
        for rank in ranks[:4]
    )
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return build_connection_error(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}",
        f"{what}: the process was killed or its machine is down; the run was stopped",
    )


class Heartbeat:
    """The heartbeat of another rank, as this rank observes it."""

    def __init__(self, store: Store, rank: int) -> None:
        self.text = ""  # the number of the beat, and the bytes that the rank has processed
        self._store = store
        self._key = f"beat/{rank}"
        self._changed = time.monotonic()

    def measure_silence(self) -> float:
        """Return for how many seconds the heartbeat has not changed, at most since `__init__`."""
        # `get` would wait for a key that does not exist yet.
        text = self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        if text != self.text:
            self.text, self._changed = text, time.monotonic()
        return time.monotonic() - self._changed


class RankWatch:
    """A thread that sends heartbeats and interrupts this rank when another one fails or stops.

    Args:
        patience: seconds without a heartbeat after which a rank is considered dead.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        self.progress: Progress | None = None
        self.failure: ReshardError | None = None
        self.interrupts = False
        self._store = store
        self._rank = rank
        watched = range(1, size) if rank == 0 else range(1)
        self._heartbeats = {rank: Heartbeat(store, rank) for rank in watched}
        self._patience = patience
        self._beats = 0
        self._done = 0
        self._others_done = 0
        self._lock = threading.Lock()
        self._beat()
        self.stop = threads.repeat(self._beat, _BEAT, "reshard-ranks")

    def count(self, nbytes: int) -> None:
        """Add to the number of bytes that this rank has processed."""
        with self._lock:
            self._done += nbytes
            if self._rank == 0 and self.progress:
                self.progress(nbytes)

    def check(self) -> None:
        """Raise the failure of another rank, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _beat(self) -> bool:
        """Send one heartbeat; it goes on after a failure, while this rank cleans up."""
        self._beats += 1
        try:
            self._store.set(f"beat/{self._rank}", f"{self._beats} {self._done}")
            failure = self.failure or _read_failure(self._store) or self._listen()
        except RuntimeError:  # the store, which is on rank 0's machine, does not answer
            failure = build_connection_error("rank 0", "its machine does not respond")
        if failure is not None and self.failure is None:
            self.failure = failure
            if self.interrupts:  # a signal is the only way to interrupt the main thread
                os.kill(os.getpid(), signal.SIGTERM)
        return True

    def _listen(self) -> ReshardError | None:
        silence = {rank: beat.measure_silence() for rank, beat in self._heartbeats.items()}
        self._show_progress()
        dead = [rank for rank, seconds in silence.items() if seconds > self._patience]
        what = f"sent no heartbeat for {self._patience:.0f} s"
        return build_lost_ranks_error(self._store, dead, what) if dead else None

    def _show_progress(self) -> None:
        if self._rank != 0 or self.progress is None:
            return
        texts = (beat.text for beat in self._heartbeats.values())
        others_done = sum(int(text.split()[1]) for text in texts if text)
        with self._lock:
            self.progress(others_done - self._others_done)
        self._others_done = others_done
