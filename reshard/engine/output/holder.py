"""Lock holders: how a process identifies itself in the lock of an unfinished output."""

from __future__ import annotations

import json
import os
from pathlib import Path

from reshard.errors import ExistsError

Holder = dict[str, object]  # pid, host


def encode_self() -> bytes:
    """Return the content that this process writes into a lock."""
    return json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode()


def decode(data: bytes) -> Holder | None:
    """Return the holder that wrote `data`, or None if the data are incomplete."""
    try:
        holder = json.loads(data)
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and {"pid", "host"} <= holder.keys() else None


def describe(holder: Holder | None) -> str:
    """Return the holder's process and host as text for an error message."""
    return f"process {holder['pid']} on {holder['host']}" if holder else "another process"


def is_dead(holder: Holder) -> bool:
    """Return whether the holder ran on this machine and has ended; False for other machines."""
    if holder["host"] != os.uname().nodename:
        return False
    try:
        os.kill(int(str(holder["pid"])), 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):  # another user's process, or not a pid
        return False
    return False


def build_conflict_error(destination: Path) -> ExistsError:
    """Return the error for a destination that another process has created first."""
    return ExistsError(
        destination,
        "was created by another process during this run",
        "this run did not change it",
    )
