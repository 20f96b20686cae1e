"""Who holds a place at which an output grows: what its process writes down there of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

from reshard.errors import ExistsError

Holder = dict[str, object]  # pid, host


def signature() -> bytes:
    """Of this process."""
    return json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode()


def read(data: bytes) -> Holder | None:
    """Who wrote it; None where that is not whole."""
    try:
        said = json.loads(data)
    except ValueError:
        return None
    return said if isinstance(said, dict) and {"pid", "host"} <= said.keys() else None


def named(who: Holder | None) -> str:
    """A holder, in an error."""
    return f"process {who['pid']} on {who['host']}" if who else "another process"


def is_dead(who: Holder) -> bool:
    """Whether it ran here and runs no more; of other machines nobody knows."""
    if who["host"] != os.uname().nodename:
        return False
    try:
        os.kill(int(str(who["pid"])), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):
        return False
    return False


def came_first(destination: Path) -> ExistsError:
    """What to raise where another process has written what this one was to write."""
    return ExistsError(
        destination, "was created by another process meanwhile", "nothing was changed"
    )
