"""Teams: the processes that share one conversion, and the collective operations between them.

Every process reads the same headers and computes the same plan. Each fills its share of the
windows, and the first one commits. A single process is a team of one, so `move.execute` needs no
second code path. `torchrun` implements the team of several processes; `move.share` assigns windows.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from reshard.errors import DifferentError

T = TypeVar("T")

Progress = Callable[[int], None]


def ignore_progress(_nbytes: int) -> None:
    """Ignore progress: the default where nothing displays it."""


class Team:
    """The processes that share a conversion; this base class is the team of a single process."""

    rank = 0
    size = 1  # the number of processes

    @property
    def first(self) -> bool:
        """Whether this process creates and commits the output and prints messages."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order, on every rank."""
        return [data]

    def with_progress(self, progress: Progress) -> Progress:
        """Return a progress function that adds up the work of all ranks on the first rank."""
        return progress

    def abort_on_failure(self) -> AbstractContextManager[None]:
        """Return a context in which this rank is interrupted if another rank fails."""
        return contextlib.nullcontext()


ALONE = Team()


def broadcast_text(team: Team, text: str) -> str:
    """Return the first rank's `text` on every rank."""
    return team.all_gather(text.encode() if team.first else b"")[0].decode()


def select_share(team: Team, items: Sequence[T]) -> Sequence[T]:
    """Return every `team.size`-th item, from this rank's number on: its share of the items."""
    return items[team.rank :: team.size]


def check_ranks_agree(team: Team, what: str, text: str) -> None:
    """Check that every rank has the same `text` as the first rank.

    Raises:
        DifferentError: some ranks have another text; the message names them.
    """
    digests = team.all_gather(hashlib.sha256(text.encode()).digest())
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        ranks = "ranks" if len(others) > 1 else "rank"
        raise DifferentError(
            what,
            f"is not the same on all {team.size} ranks: {ranks} {', '.join(others)} and rank 0"
            " differ",
            "start every rank with the same command, and with the same files at the same paths",
        )
