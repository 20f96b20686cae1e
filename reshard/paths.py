"""The one place where text becomes a path: of this machine, or of an object store by its URL."""

from __future__ import annotations

import os
import re
from pathlib import Path

# pathlib makes one slash of two, so that a URL which was a Path already is known by one.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(?://|/(?=[^/]))(.+)", re.DOTALL)


def as_path(where: str | os.PathLike[str]) -> Path:
    """The path that ``s3://bucket/key``, ``file:///dir`` or a name of this machine stands for."""
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
    """Whether the text of a path is a URL: what `as_path` made of one is.

    A text of a pickle in such a file (`reshard.escaped`) is read through the file.
    """
    return "://" in where and "\0" not in where
