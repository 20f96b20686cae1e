"""Options for the execution of a plan, on a disk or into an object store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reshard.engine.move.ahead import AHEAD_BYTES
from reshard.engine.move.fill import READ_BYTES
from reshard.system.ranks.team import ALONE, Progress, Team, ignore_progress

OnOverflow = Literal["error", "clamp", "allow"]
"""What to do if a cast makes a finite value infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOptions:
    """Options for moving bytes; of these, only ``clamp`` influences the output.

    Args:
        workers: the number of threads, each with buffers of its own; one runs as a plain loop.
        read_bytes: upper limit of one read that needs a cast or has gaps, in bytes.
        ahead_bytes: upper limit of the memory for what is read ahead, in bytes; see `ahead`.
        clamp: see `cast.cast`.
        verify: read back every byte after writing it.
        progress: called with the number of bytes of every finished window.
        team: the ranks that share the work and then exchange their outcomes.
    """

    workers: int = 1
    read_bytes: int = READ_BYTES
    ahead_bytes: int = AHEAD_BYTES
    clamp: bool = False
    verify: bool = True
    progress: Progress = ignore_progress
    team: Team = ALONE
