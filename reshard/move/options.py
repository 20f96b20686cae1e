"""How a plan is carried out, whether on a disk or into an object store."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.move.fill import READ_BYTES
from reshard.ranks.team import ALONE, Progress, Team, ignore_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOptions:
    """How bytes are moved; but for ``clamp``, the output does not depend on it.

    Args:
        workers: threads, each with buffers of its own; one is a plain loop.
        read_bytes: an upper limit of one read that needs a cast or has gaps.
        clamp: see `cast.cast`.
        verify: read every byte back.
        progress: called with the bytes of every finished window.
        team: each rank does its share, and learns what all of them saw.
    """

    workers: int = 1
    read_bytes: int = READ_BYTES
    clamp: bool = False
    verify: bool = True
    progress: Progress = ignore_progress
    team: Team = ALONE
