"""Files that are on disk when the call returns, and are read without running code from them."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainer.core.errors import CheckpointError

_PROBE = 1 << 20


def save(value: Any, path: Path, *, pickle_module: Any = pickle) -> None:
    """Save with ``torch.save``, then flush to the disk.

    torch opens the file itself, because it then names the archive in it after the file.
    """
    path.touch()
    try:
        torch.save(value, path, pickle_module=pickle_module)
    except RuntimeError:
        _check_writable(path)
        raise
    sync(path)


def _check_writable(path: Path) -> None:
    """Raise the OSError of a failing write: torch reports that one failed, but not why."""
    with path.open("ab", buffering=0) as file:
        file.write(bytes(_PROBE))


def load(path: Path) -> Any:
    """Load with ``torch.load`` onto the CPU, lazily if the format allows it.

    Only classes on torch's allow-list are created; extend the list around the call.

    Raises:
        CheckpointError: the file is missing or damaged, or names other classes.
    """
    try:
        mmap = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing", "copy it from where the run was saved", one_rank=True
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise make_read_error(path, error) from error


def check_keys(content: Any, path: Path, *keys: str) -> None:
    """Check that the content of a file is a dictionary with these keys.

    Raises:
        CheckpointError: it is not, or lacks a key.
    """
    problem = ""
    if not isinstance(content, dict):
        problem = f"contains a {type(content).__name__}, expected a dictionary"
    elif missing := [key for key in keys if key not in content]:
        problem = f"has no {missing[0]}"
    if problem:
        raise CheckpointError(
            f"{path} {problem}",
            "the file is damaged or from another program; resume from another --tag or copy it "
            "again",
            one_rank=True,
        )


def make_read_error(path: Path | str, error: Exception) -> CheckpointError:
    """Return the error to raise for torch's, with the line of its message that gives the cause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if "Unsupported" in line or "failed finding" in line]
    reason = (causes or lines or [type(error).__name__])[0]
    return CheckpointError(
        f"cannot read {path}: {reason}",
        "the file is damaged or from another program; resume from another --tag or copy it again",
        one_rank=True,
    )


def write_text(path: Path, text: str) -> None:
    """Replace the content of the file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the content of the file by ``value`` as JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
