"""Files that are on the disk when the call returns, and are read without running their code."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import stamps
from trainer.errors import CheckpointError

_PROBE = 1 << 20


def save(value: Any, path: Path, *, pickle_module: Any = pickle) -> None:
    """``torch.save`` with the stamp of the save, then flush to the disk.

    torch opens the file itself, for it then names the archive in it after the file.
    """
    path.touch()
    try:
        torch.save(stamps.stamped(value, path.name), path, pickle_module=pickle_module)
    except RuntimeError:
        _check_writable(path)
        raise
    sync(path)


def _check_writable(path: Path) -> None:
    """Raise the OSError that a write has here: torch says that one failed, not why."""
    with path.open("ab", buffering=0) as file:
        file.write(bytes(_PROBE))


def load(path: Path) -> Any:
    """``torch.load`` onto the CPU, lazily where the format allows.

    Only torch's allow-list of classes is made; extend it around the call.

    Raises:
        CheckpointError: the file is missing, damaged, or asks for other classes.
    """
    try:
        mmap = zipfile.is_zipfile(path)
        return stamps.without(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing", "copy it from where the run was saved", one_rank=True
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: Exception) -> CheckpointError:
    """What to raise for torch's error: the line of its message that tells what is wrong."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Unsupported" in line or "failed finding" in line]
    reason = (telling or lines or [type(error).__name__])[0]
    return CheckpointError(f"{path} cannot be read: {reason}", one_rank=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file's content, whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the file by this value."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Make a file durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
