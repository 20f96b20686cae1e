"""The files of a directory."""

from __future__ import annotations

import tarfile
from pathlib import Path


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the content of every file in a directory and below it, by relative path."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def unpack(packed: Path, place: Path) -> Path:
    """Unpack an archive of checkpoints into a directory, and return the directory."""
    with tarfile.open(packed) as archive:
        archive.extractall(place, filter="data")
    return place
