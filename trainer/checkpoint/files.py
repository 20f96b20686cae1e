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

from trainer.errors import CheckpointError


def save(value: Any, path: Path, *, pickle_module: Any = pickle) -> None:
    """``torch.save``, then flush to the disk."""
    with path.open("wb") as file:
        try:
            torch.save(value, file, pickle_module=pickle_module)
        except RuntimeError as error:
            # A write that fails leaves torch's archive unfinished; that is told, not the reason.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> Any:
    """``torch.load`` onto the CPU, lazily where the format allows.

    Only torch's allow-list of classes is made; extend it around the call.

    Raises:
        CheckpointError: the file is missing, damaged, or asks for other classes.
    """
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
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
