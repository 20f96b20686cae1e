"""Paths from text: local paths, and URLs of object stores; the rank that a file name states."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path, PurePosixPath

from reshard.errors import UsageError

# pathlib collapses two slashes into one, so a URL that has been a Path has only one left.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(?://|/(?=[^/]))(.+)", re.DOTALL)
_HUB_PAGE = re.compile(r"https?:/+huggingface\.co/")
_NOT_STORES = ("http", "https", "ftp")
# In DeepSpeed's names, mp_rank and expp_rank are the tensor-parallel and the expert-parallel rank,
# whose files several ranks share. ``__0_1.distcp`` and ``shard-0-model-...`` are files of DCP.
_RANK = re.compile(r"(?:(?<!mp_)(?<!expp_)(?<![a-z])rank[-_]?|(?:^|/)(?:__|shard-))(\d+)")


def as_path(where: str | os.PathLike[str]) -> Path:
    """Return the path for ``s3://bucket/key``, ``file:///dir`` or a local name.

    Raises:
        UsageError: the text is empty. pathlib would read it as the working directory, and a script
            with an unset variable would convert whatever is there. Or it is a page on the web.
    """
    text = str(where)
    if not text:
        raise UsageError(
            "''",
            "the path is empty",
            "set the variable that should contain it, or pass . for the working directory",
        )
    match = _URL.match(text)
    if match is None:
        return where if isinstance(where, Path) else Path(text)
    scheme, rest = match.groups()
    if scheme in ("file", "local"):
        return Path("/" + rest.lstrip("/"))
    if scheme in _NOT_STORES:
        if _HUB_PAGE.match(text):
            raise UsageError(where, "is a page of the Hub", "pass its repository: hf://ORG/NAME")
        raise UsageError(
            where,
            "is not in an object store: a web server does not list files with their sizes",
            "download the files, or pass s3://, gs://, az:// or hf://",
        )
    from reshard.system.remote.path import RemotePath

    return where if isinstance(where, RemotePath) else RemotePath(f"{scheme}:/{rest.strip('/')}")


def is_remote(where: str) -> bool:
    """Return whether the text of a path is a URL, as `as_path` produces it.

    The name of an escaped text inside a remote file (`reshard.system.escaped`) is not a URL.
    """
    return "://" in where and "\0" not in where


def resolve(path: Path) -> Path:
    """Return a path without links; Python before 3.13 has no path for links that form a loop."""
    return path if is_remote(str(path)) else Path(os.path.realpath(path))


def get_stem(path: str) -> str:
    """Return a file's name without its last suffix, as ``PurePath.stem``, which takes far longer.

    >>> get_stem("run/rank.0.pt"), get_stem("run/.metadata"), get_stem("latest")
    ('rank.0', '.metadata', 'latest')
    """
    name = path.rpartition("/")[2]
    at = name.rfind(".")
    return name[:at] if at > 0 else name


def shorten_names(paths: Iterable[str]) -> dict[str, str]:
    """Return path -> path below the directory that all of them share.

    >>> shorten_names(["/run/a/1.pt", "/run/b/2.pt"])
    {'/run/a/1.pt': 'a/1.pt', '/run/b/2.pt': 'b/2.pt'}
    """
    parts = {path: PurePosixPath(path).parts for path in paths}
    levels = zip(*(names[:-1] for names in parts.values()), strict=False)
    common = len(list(takewhile(lambda names: len({*names}) == 1, levels)))
    return {path: "/".join(names[common:]) for path, names in parts.items()}


def explain_tilde(path: Path) -> str:
    """Return advice about a path that begins with ``~``, which only a shell expands; else ""."""
    here = Path.cwd()
    given = path.relative_to(here) if path.is_relative_to(here) else path
    try:
        expanded = given.expanduser()
    except RuntimeError:  # there is no such user
        return ""
    if expanded == given:
        return ""
    return f"pass {expanded}; a shell expands ~ only outside quotes, and Python does not"


def find_rank(name: str) -> int | None:
    """Return the rank that a file name states; None if it states none.

    >>> find_rank("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"), find_rank("__12_0.distcp")
    (3, 12)
    >>> find_rank("expp_rank_1_mp_rank_00_optim_states.pt") is None
    True
    """
    match = _RANK.search(name)
    return int(match[1]) if match else None
