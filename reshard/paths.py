"""Conversion of text to paths: local paths, or paths in an object store for URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

# pathlib collapses two slashes into one, so a URL that has been a Path has only one left.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(?://|/(?=[^/]))(.+)", re.DOTALL)


def as_path(where: str | os.PathLike[str]) -> Path:
    """Return the path for ``s3://bucket/key``, ``file:///dir`` or a local name."""
    text = str(where)
    match = _URL.match(text)
    if match is None:
        return where if isinstance(where, Path) else Path(text)
    scheme, rest = match.groups()
    if scheme in ("file", "local"):
        return Path("/" + rest.lstrip("/"))
    from reshard.remote.path import RemotePath

    return where if isinstance(where, RemotePath) else RemotePath(f"{scheme}:/{rest.strip('/')}")


def is_remote(where: str) -> bool:
    """Return whether the text of a path is a URL, as `as_path` produces it.

    The name of an escaped text inside a remote file (`reshard.escaped`) is not a URL.
    """
    return "://" in where and "\0" not in where
