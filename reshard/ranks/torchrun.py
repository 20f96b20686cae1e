"""The team of several processes, by torch.distributed with gloo: `torchrun -m reshard ...`.

Ranks wait for one another on torch's key-value store, in steps that a signal can interrupt. A rank
that failed, or died, on whatever machine, ends the run; see `heartbeat`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from reshard.errors import INTERRUPTED, ReshardError
from reshard.ranks.heartbeat import Watch, dead, gone, said, tell
from reshard.ranks.team import ALONE, Progress, Team
from reshard.signals import ENDING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_MEETING = 60.0  # seconds until all ranks must be there
_PATIENCE = 60.0  # seconds without one, and a rank is taken for dead
_LAST_WORDS = 5.0  # seconds to wait for the other ranks' when this one was interrupted
_CLEANING = 20.0  # seconds to wait for the first rank, which cleans up and speaks
_STEP = 0.02, 0.5  # seconds between two looks at the store, the first and the longest
_DONE = "what was asked for had been done before, whole"
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class SaidByFirstError(ReshardError):
    """What ended this rank: the first one has printed it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("this rank", "ended with the others")
        self.exit_code = exit_code


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    named = all(name in os.environ for name in _LAUNCHED)
    return named and os.environ["WORLD_SIZE"].isdigit() and int(os.environ["WORLD_SIZE"]) > 1


@contextlib.contextmanager
def joined() -> Iterator[Team]:
    """The team that this process was launched into; its end is every rank's end.

    Raises:
        ReshardError: another rank failed or died; the first rank raises it with its message.
    """
    if not launched():
        yield ALONE
        return
    team = Ranks(*_met_at_store(), _PATIENCE)
    try:
        yield team
        team.part()
    except BaseException as error:
        failure = team.end(error)
        if failure is error:
            raise
        raise failure from error
    finally:
        team.close()


def _met_at_store() -> tuple[Store, int, int]:
    from torch.distributed.rendezvous import rendezvous

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        met: tuple[Store, int, int] = next(
            rendezvous("env://", timeout=timedelta(seconds=_MEETING))
        )
    except (RuntimeError, ValueError) as error:
        raise ReshardError(
            where,
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} does not reach the others:"
            f" {str(error).splitlines()[0]}",
            "start it with torchrun, or unset RANK and WORLD_SIZE to run alone",
        ) from error
    return met


class Ranks:
    """The processes of a launcher, by torch.distributed with gloo."""

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank = rank
        self.size = size
        self._store = PrefixStore("reshard", store)
        self._meetings = 0
        self._grouped = False
        self._is_told = False  # why this rank ends
        self._patience = patience
        self._store.set(f"host/{rank}", platform.node())
        self._watch = Watch(self._store, rank, size, patience)
        self._watch.start()
        self.meet()

    @property
    def first(self) -> bool:
        """Whether this process creates, commits and speaks."""
        return self.rank == 0

    def meet(self) -> None:
        """Go on when every rank is here.

        Raises:
            ReshardError: one will not come.
        """
        self._meetings += 1
        name, step = f"met/{self._meetings}", _STEP[0]
        try:
            count = self._store.add(name, 1)
            while count < self.size:
                self._watch.check()
                time.sleep(step)
                step = min(step * 1.5, _STEP[1])
                count = self._store.add(name, 0)
        except RuntimeError as error:  # the store died with its machine
            self._lost(error)

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order."""
        self.meet()  # what can wait long waits there, where it can be interrupted
        try:
            return self._exchanged(data)
        except RuntimeError as error:  # gloo: a connection closed
            self._lost(error)

    def watched(self, progress: Progress) -> Progress:
        """Progress that shows the work of all ranks at the first one."""
        self._watch.shown = progress
        return self._watch.count

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """A block that is interrupted when another rank fails; outside, `meet` raises it.

        What follows the block cleans up, and must not be interrupted: when the first rank comes to
        it, the others have ended.

        Raises:
            ReshardError: what ended another rank, where that is why this one was interrupted.
        """
        self._watch.interrupts = True
        try:
            self._watch.check()
            yield
        except BaseException as error:
            self._watch.interrupts = False
            failure = self._told(error)
            if failure is error:
                raise
            raise failure  # noqa: B904 - its own cause says whether another run may succeed
        finally:
            self._watch.interrupts = False

    def end(self, error: BaseException) -> BaseException:
        """Tell the others that this rank fails, and wait until the first has cleaned up.

        Returns:
            What this rank should raise.
        """
        self._watch.stop()
        failure = self._told(error)
        with contextlib.suppress(RuntimeError):  # without a store, every rank speaks for itself
            self._store.set(f"ended/{self.rank}", "")
            if self.first:
                self._store.set("told", "")
            elif self._first_speaks():
                return SaidByFirstError(getattr(failure, "exit_code", 1))
            elif _is_interrupt(failure):  # by a launcher that lost the first
                return self._dead([0], failure)
        return failure

    def part(self) -> None:
        """Meet a last time; the first rank, which may have the store, leaves after the others.

        Raises:
            ReshardError: one will not come; what was to be done is done all the same.
        """
        try:
            self.meet()
        except ReshardError as error:
            error.remedy = _DONE
            raise
        except KeyboardInterrupt as error:  # a launcher that lost a rank
            error.args = (_DONE,)
            raise
        self._watch.stop()
        if not self.first:
            self._store.set(f"parted/{self.rank}", "")
            return
        for rank in range(1, self.size):
            self._comes(f"parted/{rank}", _LAST_WORDS)

    def close(self) -> None:
        """Leave the others."""
        from torch import distributed

        self._watch.stop()
        if self._grouped:
            distributed.destroy_process_group()

    def _exchanged(self, data: bytes) -> list[bytes]:
        import torch
        from torch import distributed

        if not self._grouped:
            distributed.init_process_group(
                "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._patience),
            )
            self._grouped = True
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

    def _lost(self, error: RuntimeError) -> NoReturn:
        """Raise why another rank left in the middle of an exchange."""
        with contextlib.suppress(RuntimeError):
            self._comes("failed", _LAST_WORDS)
            failure = said(self._store)
            if failure is not None:
                raise failure
        raise gone("another rank", f"ended without a word ({str(error).splitlines()[0]})")

    def _told(self, error: BaseException) -> BaseException:
        """What ended the run, once the others know it; the first rank waits for them to end."""
        if self._is_told:
            return error
        self._is_told = True
        for number in ENDING:  # a launcher ends the others of a node
            signal.signal(number, signal.SIG_IGN)
        ours = isinstance(error, ReshardError)
        failure = error if ours or self._watch.failure is None else self._watch.failure
        with contextlib.suppress(RuntimeError):  # the store died with its machine
            self._store.set(f"ending/{self.rank}", "")
            tell(self._store, f"rank {self.rank} ({platform.node()})", failure)
            silent = self._silent() if self.first else []
            if silent and _is_interrupt(failure):  # here or there, by a launcher that lost one
                return self._dead(silent, failure)
        return failure

    def _dead(self, ranks: Sequence[int], failure: BaseException) -> ReshardError:
        """Ranks that say nothing more, in the place of an interrupt."""
        told = dead(self._store, ranks, "ended without a word")
        more = [failure.remedy] if isinstance(failure, ReshardError) else failure.args
        told.remedy = "; ".join(str(each) for each in more if each) or told.remedy
        return told

    def _first_speaks(self) -> bool:
        """Wait for the first rank, as long as it beats or is known to clean up."""
        beat, heard = b"", time.monotonic()
        until = heard + _CLEANING
        while not self._store.check(["told"]):
            now, last = time.monotonic(), beat
            if self._store.check(["beat/0"]) and (beat := self._store.get("beat/0")) != last:
                heard = now
            lives = now - heard < _LAST_WORDS or self._store.check(["ending/0"])
            if now > until or not lives:
                return False
            time.sleep(_STEP[0])
        return True

    def _silent(self) -> list[int]:
        """Ranks that neither end nor set about it, although they are told to."""
        until = time.monotonic() + _LAST_WORDS
        silent = list(range(1, self.size))
        while silent and time.monotonic() < until:
            time.sleep(_STEP[0])
            silent = [rank for rank in silent if not self._store.check([f"ended/{rank}"])]
        return [rank for rank in silent if not self._store.check([f"ending/{rank}"])]

    def _comes(self, key: str, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(_STEP[0])
        return True


def _is_interrupt(failure: BaseException) -> bool:
    told = getattr(failure, "exit_code", None) == INTERRUPTED
    return told or isinstance(failure, KeyboardInterrupt)
