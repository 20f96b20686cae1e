"""The team of several processes started by a launcher: `torchrun -m reshard ...`.

Data is exchanged through torch's key-value store. Barriers poll it, in steps that a signal can
interrupt. A rank that fails or dies, on any machine, stops the run (`heartbeat`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from reshard.errors import INTERRUPTED, ReshardError
from reshard.system import signals
from reshard.system.ranks.heartbeat import (
    Heartbeat,
    RankWatch,
    build_connection_error,
    build_lost_ranks_error,
    publish_failure,
)
from reshard.system.ranks.team import ALONE, Progress, Team

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_CONNECT_TIMEOUT = 60.0  # seconds in which all ranks must connect
_PATIENCE = 60.0  # seconds without a heartbeat after which a rank is considered dead
_REPORT_WAIT = 5.0  # seconds to wait for the report of a rank that sends no heartbeat
_LONGEST_REPORT_WAIT = 10.0  # seconds to wait for the other ranks' reports after a failure
_CLEANUP_WAIT = 20.0  # seconds to wait for the first rank, which cleans up and prints the error
_STEP = 0.02, 0.5  # seconds between two polls of the store: the first and the longest
_PIECE = 4 << 20  # bytes; the store refuses values of more than 8 MiB (torch 2.13)
_NO_REPORT = "ended without reporting an error"
_DONE = "the work itself was already complete"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ReportedByFirstRankError(ReshardError):
    """An error that the first rank has printed already; this rank exits without a message."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("this rank", "ended because another rank failed")
        self.exit_code = exit_code


def _is_launched() -> bool:
    if not all(name in os.environ for name in _LAUNCHER_VARIABLES):
        return False
    return os.environ["WORLD_SIZE"].isdigit() and int(os.environ["WORLD_SIZE"]) > 1


@contextlib.contextmanager
def join_team() -> Iterator[Team]:
    """Join the team that this process was launched into; the block ends on all ranks together.

    Raises:
        ReshardError: another rank failed or died; the first rank raises its error.
    """
    if not _is_launched():
        yield ALONE
        return
    team = Ranks(*_connect_to_store(), _PATIENCE)
    try:
        yield team
        team.leave()
    except BaseException as error:
        failure = team.end(error)
        if failure is error:
            raise
        raise failure from error


def _connect_to_store() -> tuple[Store, int, int]:
    from torch.distributed.rendezvous import rendezvous

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        connected: tuple[Store, int, int] = next(
            rendezvous("env://", timeout=timedelta(seconds=_CONNECT_TIMEOUT))
        )
    except (RuntimeError, ValueError) as error:
        raise ReshardError(
            where,
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot connect to the other"
            f" ranks: {str(error).splitlines()[0]}",
            "start reshard with torchrun, or unset RANK and WORLD_SIZE to run one process",
        ) from error
    return connected


class Ranks(Team):
    """The team of all processes of a launcher, which communicate by torch's key-value store."""

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank = rank
        self.size = size
        # torchrun's agent may have keys in the same store (torch 2.13 distributed/rendezvous.py).
        self._store = PrefixStore("reshard", store)
        self._barriers = 0
        self._gathers = 0
        self._is_reported = False  # whether this rank has published why it ends
        self._patience = patience
        self._store.set(f"host/{rank}", platform.node())
        self._watch = RankWatch(self._store, rank, size, patience)
        self.barrier()

    def barrier(self) -> None:
        """Wait until every rank has called this method.

        Raises:
            ReshardError: another rank failed or died.
        """
        self._barriers += 1
        name, step = f"barrier/{self._barriers}", _STEP[0]
        try:
            count = self._store.add(name, 1)
            while count < self.size:
                self._watch.check()
                signals.check()
                time.sleep(step)
                step = min(step * 1.5, _STEP[1])
                # Adding 0 reads a counter without waiting.
                count = self._store.add(name, 0)
        except RuntimeError as error:
            raise _build_store_error(error) from error

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order, on every rank.

        Raises:
            ReshardError: another rank failed or died.
        """
        self._gathers += 1
        name = f"gather/{self._gathers}"
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        try:
            for number, piece in enumerate(pieces):
                # The stub of `set` wants a str, but the store takes and returns bytes.
                self._store.set(f"{name}/{self.rank}/{number}", piece)  # type: ignore[arg-type]
            self._store.set(f"{name}/{self.rank}", str(len(pieces)))
            self.barrier()  # waits for the data here, where a signal can interrupt it
            return [self._read_pieces(f"{name}/{rank}") for rank in range(self.size)]
        except RuntimeError as error:
            raise _build_store_error(error) from error

    def _read_pieces(self, name: str) -> bytes:
        count = int(self._store.get(name))
        return b"".join(self._store.get(f"{name}/{number}") for number in range(count))

    def with_progress(self, progress: Progress) -> Progress:
        """Return a progress function that adds up the work of all ranks on the first rank."""
        self._watch.progress = progress
        return self._watch.count

    @contextlib.contextmanager
    def abort_on_failure(self) -> Iterator[None]:
        """Interrupt the block if another rank fails; outside of it, `barrier` raises the failure.

        The code after the block cleans up and must not be interrupted. When the first rank reaches
        it, the others have ended.

        Raises:
            ReshardError: another rank failed, and this rank was interrupted for that reason.
        """
        self._watch.interrupts = True
        try:
            self._watch.check()
            yield
        except BaseException as error:
            self._watch.interrupts = False
            failure = self._report(error)
            if failure is error:
                raise
            raise failure  # noqa: B904 - its own cause says whether another run may succeed
        finally:
            self._watch.interrupts = False

    def end(self, error: BaseException) -> BaseException:
        """Report to the other ranks that this rank fails, and wait until the first has cleaned up.

        Returns:
            The error that this rank should raise.
        """
        self._watch.stop()
        failure = self._report(error)
        with contextlib.suppress(RuntimeError):  # without a store, each rank prints its own error
            self._store.set(f"ended/{self.rank}", "")
            if self.first:
                self._store.set("reported", "")
                ended = [r for r in range(1, self.size) if self._store.check([f"ended/{r}"])]
                self._leave_after(ended)
            elif self._wait_for_first():
                self._store.set(f"left/{self.rank}", "")
                return ReportedByFirstRankError(getattr(failure, "exit_code", 1))
            elif _is_interrupt(failure):  # sent by a launcher that lost the first rank
                return self._explain_silence([0], failure)
        return failure

    def leave(self) -> None:
        """Pass a last barrier; the first rank, which may host the store, leaves after the others.

        Raises:
            ReshardError: another rank died; the work was complete before that.
        """
        try:
            self.barrier()
        except ReshardError as error:
            error.remedy = _DONE
            raise
        except KeyboardInterrupt as error:  # sent by a launcher that lost a rank
            error.args = (_DONE,)
            raise
        self._watch.stop()
        if self.first:
            self._leave_after(range(1, self.size))
        else:
            self._store.set(f"left/{self.rank}", "")

    def _report(self, error: BaseException) -> BaseException:
        # The first rank also waits until the others have ended.
        if self._is_reported:
            return error
        self._is_reported = True
        # When one rank ends, a launcher sends signals to the rest of its node.
        # This rank's own watch has sent one too, which must not interrupt the cleanup.
        signals.ignore()
        ours = isinstance(error, ReshardError)
        failure = error if ours or self._watch.failure is None else self._watch.failure
        with contextlib.suppress(RuntimeError):  # the store died with its machine
            self._store.set(f"ending/{self.rank}", "")
            publish_failure(self._store, f"rank {self.rank} ({platform.node()})", failure)
            silent = self._find_silent() if self.first else []
            if silent and _is_interrupt(failure):  # sent by a launcher that lost a rank
                return self._explain_silence(silent, failure)
        return failure

    def _explain_silence(self, ranks: Sequence[int], failure: BaseException) -> ReshardError:
        error = build_lost_ranks_error(self._store, ranks, _NO_REPORT)
        remedies = [failure.remedy] if isinstance(failure, ReshardError) else failure.args
        error.remedy = "; ".join(str(remedy) for remedy in remedies if remedy) or error.remedy
        return error

    def _wait_for_first(self) -> bool:
        beat = Heartbeat(self._store, 0)
        until = time.monotonic() + _CLEANUP_WAIT
        while not self._store.check(["reported"]):
            is_alive = beat.measure_silence() < _REPORT_WAIT or self._store.check(["ending/0"])
            if time.monotonic() > until or not is_alive:
                return False
            time.sleep(_STEP[0])
        return True

    def _find_silent(self) -> list[int]:
        # A rank that still sends heartbeats is alive, even if it waits for its disk for a long
        # time.
        until = time.monotonic() + _LONGEST_REPORT_WAIT
        beats = {rank: Heartbeat(self._store, rank) for rank in range(1, self.size)}
        running = silent = list(beats)
        while running and time.monotonic() < until:
            time.sleep(_STEP[0])
            running = [rank for rank in running if not self._store.check([f"ended/{rank}"])]
            silent = [rank for rank in running if beats[rank].measure_silence() > _REPORT_WAIT]
            if len(silent) == len(running):
                break
        return [rank for rank in silent if not self._store.check([f"ending/{rank}"])]

    def _leave_after(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks no longer need the store, which may end with this rank."""
        until = time.monotonic() + _REPORT_WAIT
        while not self._store.check([f"left/{rank}" for rank in ranks]):
            if time.monotonic() > until:
                return
            signals.check()
            time.sleep(_STEP[0])


def _build_store_error(error: RuntimeError) -> ReshardError:
    """Return the error for a store that does not answer; it dies with rank 0 or its machine."""
    return build_connection_error("rank 0", f"{_NO_REPORT} ({str(error).splitlines()[0]})")


def _is_interrupt(failure: BaseException) -> bool:
    exit_code = getattr(failure, "exit_code", None)
    return exit_code == INTERRUPTED or isinstance(failure, KeyboardInterrupt)
