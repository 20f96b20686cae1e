"""Whether output may come to lie where it is asked for; said before any work is done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard.errors import ExistsError, ResourceError, UsageError
from reshard.paths import is_remote

if TYPE_CHECKING:
    from reshard.remote.path import RemotePath

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# What a directory may hold to be replaced by --overwrite: the files of a model export.
_EXPORT_SUFFIXES = frozenset(
    [
        ".safetensors",
        ".json",
        ".bin",
        ".pt",
        ".pth",
        ".txt",
        ".model",
        ".jinja",
        ".py",
        ".md",
        ".tiktoken",
    ]
)


def check_destination(
    destination: Path,
    sources: list[Path],
    *,
    is_directory: bool,
    overwrite: bool,
    resume: bool = False,
) -> None:
    """Refuse a destination before any work is done.

    Args:
        resume: what a run has left there that died while a store copied is no obstacle.

    Raises:
        ExistsError: it exists (and ``overwrite`` is off or would delete other things), is of the
            other kind, or lies inside a source.
        UsageError: its parent directory does not exist.
    """
    real = destination.resolve()
    _check_apart(destination, sources, overwrite=overwrite)
    if is_remote(str(real)):
        if _is_moving(real) and is_directory and resume:
            return
    elif not destination.parent.is_dir():
        parent = destination.parent.resolve()
        raise UsageError(destination, f"there is no directory {parent}", "create it first")
    elif is_directory and os.path.ismount(real):
        raise ExistsError(
            destination,
            "is a mount point, whose name no other directory can get",
            "write to a directory inside it",
        )
    if destination.is_dir() and is_directory:
        _check_directory(destination, overwrite=overwrite)
    elif destination.is_dir():
        raise ExistsError(destination, "is a directory, and the output is one file", "remove it")
    elif _is_there(destination) and (is_directory or not destination.is_file()):
        raise ExistsError(destination, "exists and is no directory", "choose another name")
    elif _is_there(destination) and not overwrite:
        raise ExistsError(destination, "exists already", "remove it, or give --overwrite")


def _check_apart(destination: Path, sources: list[Path], *, overwrite: bool) -> None:
    real = destination.resolve()
    for source in sources:
        inside = source.resolve()
        if real == inside or inside in real.parents:
            raise ExistsError(
                destination,
                f"lies inside the source {source}, which is never written to",
                "choose a destination outside of it",
            )
        if real in inside.parents and overwrite:
            raise ExistsError(destination, f"contains the source {source}", "choose another place")


def _check_directory(destination: Path, *, overwrite: bool) -> None:
    children = sorted(destination.iterdir())
    foreign = [c.name for c in children if c.is_dir() or not _is_export(c.name)]
    if children and not foreign and not any(c.suffix in _WEIGHTS for c in children):
        foreign = [children[0].name]
    if children and not overwrite:
        raise ExistsError(
            destination,
            f"exists and is not empty ({children[0].name}, ...)",
            "remove it, or choose another name" if foreign else "remove it, or give --overwrite",
        )
    if foreign:
        raise ExistsError(
            destination,
            f"--overwrite would delete {foreign[0]!r}, which no model export contains",
            "remove the directory yourself, or choose another",
        )


def _is_moving(destination: Path) -> bool:
    """Whether a run was copying there, in a store that has such a bucket at all."""
    from reshard.remote import partial, writing

    there = cast("RemotePath", destination)
    writing.check_bucket(there)
    return partial.is_moving(there)


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def check_space(destination: Path, nbytes: int) -> None:
    """Refuse what cannot fit.

    Raises:
        ResourceError: the file system has less free space than ``nbytes``.
    """
    free = shutil.disk_usage(destination.parent.resolve()).free
    if free < nbytes:
        raise ResourceError(
            destination,
            f"{nbytes:,} bytes are to be written, {free:,} are free on its disk",
            "free space, or write elsewhere",
        )


def _is_export(name: str) -> bool:
    return Path(name).suffix in _EXPORT_SUFFIXES and not name.endswith("_states.pt")
