"""What the launcher has set in this process's environment."""

from __future__ import annotations

import os

from trainer.core.errors import SettingsError


def read_launcher_world_size() -> int | None:
    """Return the number of ranks that a launcher started, or None without a launcher.

    Raises:
        SettingsError: RANK is set, and WORLD_SIZE is not a number.
    """
    if "RANK" not in os.environ:
        return None
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdigit():
        raise SettingsError(
            f"the environment variable RANK is set, and WORLD_SIZE is {world!r}",
            "start the ranks with torchrun or accelerate launch, or unset RANK",
        )
    return int(world)


def is_first_rank() -> bool:
    """Return whether this process prints what all ranks find: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"
