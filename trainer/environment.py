"""What whoever started this process has told it."""

from __future__ import annotations

import os

STARTER = "TRAINER_STARTED_BY"
"""Variable with the process that started the ranks, when it was ours."""


def world_size_of_launcher() -> int | None:
    """The number of ranks that a launcher started, or None when started plainly."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def is_first() -> bool:
    """Rank 0 says what all ranks find."""
    return os.environ.get("RANK", "0") == "0"


def speaks() -> bool:
    """Whether this process tells of the settings: who started the ranks, else the first rank."""
    return is_first() and not ("RANK" in os.environ and STARTER in os.environ)
