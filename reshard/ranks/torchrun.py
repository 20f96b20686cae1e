"""The team of several processes started by a launcher: `torchrun -m reshard ...`.

Data is exchanged by torch.distributed with gloo. Barriers poll torch's key-value store, in steps
that a signal can interrupt. A rank that fails or dies, on any machine, stops the run (`heartbeat`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from reshard import signals
from reshard.errors import INTERRUPTED, ReshardError
from reshard.ranks.heartbeat import (
    RankWatch,
    build_connection_error,
    build_lost_ranks_error,
    publish_failure,
    read_failure,
)
from reshard.ranks.team import ALONE, Progress, Team

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_CONNECT_TIMEOUT = 60.0  # seconds in which all ranks must connect
_PATIENCE = 60.0  # seconds without a heartbeat after which a rank is considered dead
_REPORT_WAIT = 5.0  # seconds to wait for the other ranks' reports after a failure
_CLEANUP_WAIT = 20.0  # seconds to wait for the first rank, which cleans up and prints the error
_STEP = 0.02, 0.5  # seconds between two polls of the store: the first and the longest
_NO_REPORT = "ended without reporting an error"
_DONE = "the work itself was already complete"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ReportedByFirstRankError(ReshardError):
    """An error that the first rank has printed already; this rank exits without a message."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("this rank", "ended because another rank failed")
        self.exit_code = exit_code


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    if not all(name in os.environ for name in _LAUNCHER_VARIABLES):
        return False
    return os.environ["WORLD_SIZE"].isdigit() and int(os.environ["WORLD_SIZE"]) > 1


@contextlib.contextmanager
def join_team() -> Iterator[Team]:
    """Join the team that this process was launched into; the block ends on all ranks together.

    Raises:
        ReshardError: another rank failed or died; the first rank raises its error.
    """
    if not is_launched():
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
    finally:
        team.close()


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


class Ranks:
    """The team of all processes of a launcher, which communicate by torch.distributed with gloo."""

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank = rank
        self.size = size
        self._store = PrefixStore("reshard", store)
        self._barriers = 0
        self._has_group = False
        self._is_reported = False  # whether this rank has published why it ends
        self._patience = patience
        self._store.set(f"host/{rank}", platform.node())
        self._watch = RankWatch(self._store, rank, size, patience)
        self._watch.start()
        self.barrier()

    @property
    def first(self) -> bool:
        """Whether this process creates and commits the output and prints messages."""
        return self.rank == 0

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
                count = self._store.add(name, 0)
        except RuntimeError as error:  # the store died with its machine
            self._raise_lost(error)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order, on every rank."""
        self.barrier()  # long waits happen here, where a signal can interrupt them; gloo blocks
        try:
            return self._exchange(data)
        except RuntimeError as error:  # gloo: a connection closed
            self._raise_lost(error)

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
            elif self._wait_for_first():
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
        if not self.first:
            self._store.set(f"left/{self.rank}", "")
            return
        for rank in range(1, self.size):
            self._wait_for_key(f"left/{rank}", _REPORT_WAIT)

    def close(self) -> None:
        """Leave the process group and stop the heartbeat."""
        from torch import distributed

        self._watch.stop()
        if self._has_group:
            distributed.destroy_process_group()

    def _exchange(self, data: bytes) -> list[bytes]:
        import torch
        from torch import distributed

        if not self._has_group:
            distributed.init_process_group(
                "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._patience),
            )
            self._has_group = True
        # gloo gathers tensors of one size: exchange the lengths first, then padded data.
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        distributed.all_gather(sizes, size)
        counts = [int(each) for each in sizes]
        mine = torch.zeros(max(*counts, 1), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine)
        return [part.numpy().tobytes()[:count] for part, count in zip(parts, counts, strict=True)]

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        """Raise the reason why another rank left in the middle of an exchange."""
        with contextlib.suppress(RuntimeError):
            self._wait_for_key("failed", _REPORT_WAIT)
            failure = read_failure(self._store)
            if failure is not None:
                raise failure
        raise build_connection_error("another rank", f"{_NO_REPORT} ({str(error).splitlines()[0]})")

    def _report(self, error: BaseException) -> BaseException:
        """Publish why this rank ends and return the error that ended the run.

        The first rank also waits until the others have ended.
        """
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
        """Return an error that names the silent ranks, to raise instead of an interrupt."""
        error = build_lost_ranks_error(self._store, ranks, _NO_REPORT)
        remedies = [failure.remedy] if isinstance(failure, ReshardError) else failure.args
        error.remedy = "; ".join(str(each) for each in remedies if each) or error.remedy
        return error

    def _wait_for_first(self) -> bool:
        """Wait until the first rank has printed the error; False if it died before."""
        beat, last_change = b"", time.monotonic()
        until = last_change + _CLEANUP_WAIT
        while not self._store.check(["reported"]):
            now, last = time.monotonic(), beat
            if self._store.check(["beat/0"]) and (beat := self._store.get("beat/0")) != last:
                last_change = now
            is_alive = now - last_change < _REPORT_WAIT or self._store.check(["ending/0"])
            if now > until or not is_alive:
                return False
            time.sleep(_STEP[0])
        return True

    def _find_silent(self) -> list[int]:
        """Return the ranks that have not started to end within the waiting time."""
        until = time.monotonic() + _REPORT_WAIT
        silent = list(range(1, self.size))
        while silent and time.monotonic() < until:
            time.sleep(_STEP[0])
            silent = [rank for rank in silent if not self._store.check([f"ended/{rank}"])]
        return [rank for rank in silent if not self._store.check([f"ending/{rank}"])]

    def _wait_for_key(self, key: str, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > until:
                return False
            signals.check()
            time.sleep(_STEP[0])
        return True


def _is_interrupt(failure: BaseException) -> bool:
    exit_code = getattr(failure, "exit_code", None)
    return exit_code == INTERRUPTED or isinstance(failure, KeyboardInterrupt)
