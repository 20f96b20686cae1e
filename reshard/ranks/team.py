"""Processes that share one conversion: what they tell one another.

Every process reads the same headers and makes the same plan; each fills the windows that fall to
it, and the first one commits. A process alone is a team of one, so that there is one way through
`move.execute`; `torchrun` has the team of several, and `move.share` says what falls to each.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from reshard.errors import DifferentError

T = TypeVar("T")

Progress = Callable[[int], None]


def unseen(_nbytes: int) -> None:
    """Progress that nobody watches."""


class Team(Protocol):
    """What `execute` and the commands ask of the processes that share a conversion."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        """Whether this process creates, commits and speaks."""

    def meet(self) -> None:
        """Go on when every rank is here."""

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order."""

    def watched(self, progress: Progress) -> Progress:
        """Progress that shows the work of all ranks at the first one."""

    def heeded(self) -> AbstractContextManager[None]:
        """A block that is interrupted when another rank fails."""


class Alone:
    """A team of one."""

    rank = 0
    size = 1
    first = True

    def meet(self) -> None:
        """There is nobody to wait for."""

    def gathered(self, data: bytes) -> list[bytes]:
        """Its own."""
        return [data]

    def watched(self, progress: Progress) -> Progress:
        """Its own."""
        return progress

    def heeded(self) -> AbstractContextManager[None]:
        """Nobody else can fail."""
        return contextlib.nullcontext()


ALONE = Alone()


def told(team: Team, text: str) -> str:
    """The first rank's text, on every rank."""
    return team.gathered(text.encode() if team.first else b"")[0].decode()


def own(team: Team, items: Sequence[T]) -> Sequence[T]:
    """The items that fall to this rank, where any rank can do any."""
    return items[team.rank :: team.size]


def check_ranks_agree(team: Team, what: str, text: str) -> None:
    """Hold every rank to what the first has.

    Raises:
        DifferentError: naming the ranks that have something else.
    """
    found = team.gathered(hashlib.sha256(text.encode()).digest())
    others = [str(rank) for rank, digest in enumerate(found) if digest != found[0]]
    if others:
        raise DifferentError(
            what,
            f"rank {', '.join(others)} of {team.size} sees another than rank 0",
            "give every rank the same command, and the same files at the same paths",
        )
