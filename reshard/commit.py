"""Output appears whole or not at all: a temporary place beside the destination, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.errors import ExistsError, ReshardError, ResourceError, UsageError

_SYNCS = 16  # at a time
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
    destination: Path, sources: list[Path], *, is_directory: bool, overwrite: bool
) -> None:
    """Refuse a destination before any work is done.

    Raises:
        ExistsError: it exists (and ``overwrite`` is off or would delete other things), is of the
            other kind, or lies inside a source.
        UsageError: its parent directory does not exist.
    """
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
    if not real.parent.is_dir():
        raise UsageError(destination, f"there is no directory {real.parent}", "create it first")
    if destination.is_dir() and is_directory:
        _check_directory(destination, overwrite=overwrite)
    elif destination.is_dir():
        raise ExistsError(destination, "is a directory, and the output is one file", "remove it")
    elif os.path.lexists(destination) and (is_directory or not destination.is_file()):
        raise ExistsError(destination, "exists and is no directory", "choose another name")
    elif os.path.lexists(destination) and not overwrite:
        raise ExistsError(destination, "exists already", "remove it, or give --overwrite")


def _check_directory(destination: Path, *, overwrite: bool) -> None:
    children = sorted(destination.iterdir())
    if children and not overwrite:
        raise ExistsError(
            destination,
            f"exists and is not empty ({children[0].name}, ...)",
            "remove it, or give --overwrite",
        )
    foreign = [c.name for c in children if c.is_dir() or not _is_export(c.name)]
    if children and not foreign and not any(c.suffix in _WEIGHTS for c in children):
        foreign = [children[0].name]
    if foreign:
        raise ExistsError(
            destination,
            f"--overwrite would delete {foreign[0]!r}, which no model export contains",
            "remove the directory yourself, or choose another",
        )


def check_space(destination: Path, nbytes: int) -> None:
    """Refuse what cannot fit.

    Raises:
        ResourceError: the file system has less free space than ``nbytes``.
    """
    free = shutil.disk_usage(destination.resolve().parent).free
    if free < nbytes:
        raise ResourceError(
            destination,
            f"{nbytes:,} bytes are to be written, {free:,} are free on its disk",
            "free space, or write elsewhere",
        )


def _is_export(name: str) -> bool:
    return Path(name).suffix in _EXPORT_SUFFIXES and not name.endswith("_states.pt")


@contextlib.contextmanager
def staged(destination: Path, *, is_directory: bool, overwrite: bool) -> Iterator[Path]:
    """A temporary directory whose content becomes ``destination`` when the block ends well.

    For a file, the block must leave one file of the destination's name in it. On any exception
    the temporary directory goes and the destination is untouched.
    """
    parent = destination.resolve().parent
    place = parent / f".{destination.name}.partial-{secrets.token_hex(8)}"
    try:  # a signal may come at any time: the name is known before the directory is made
        try:
            place.mkdir(mode=0o700)
        except OSError as error:
            raise ReshardError(parent, f"cannot be written to: {error.strerror}") from error
        yield place
        _sync(place)
        if is_directory:
            _publish_directory(place, parent / destination.name, overwrite=overwrite)
        else:
            _publish_file(place / destination.name, parent / destination.name, overwrite=overwrite)
        _sync_one(parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _sync(place: Path) -> None:
    """Make all of it durable, many files at once: a journal takes them together."""
    with ThreadPoolExecutor(_SYNCS) as threads:
        for _ in threads.map(_sync_one, [*place.rglob("*"), place]):
            pass


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise ResourceError(path, f"could not be made durable: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _publish_file(made: Path, destination: Path, *, overwrite: bool) -> None:
    if overwrite:
        made.replace(destination)
        return
    try:
        os.link(made, destination)  # unlike rename, never replaces what another process put there
    except FileExistsError as error:
        raise ExistsError(
            destination, "was created by another process meanwhile", "nothing was changed"
        ) from error
    except OSError:  # a file system without hard links
        made.rename(destination)


def _publish_directory(place: Path, destination: Path, *, overwrite: bool) -> None:
    umask = os.umask(0)
    os.umask(umask)
    place.chmod(0o777 & ~umask)
    retired = place.parent / f".{destination.name}.old-{secrets.token_hex(8)}"
    replacing = overwrite and destination.exists()
    try:
        if replacing:
            destination.rename(retired)
        place.rename(destination)
    except BaseException as error:
        if replacing and retired.exists() and not destination.exists():
            retired.rename(destination)
        if not isinstance(error, OSError):
            raise
        raise ExistsError(
            destination, f"could not be put in place: {error.strerror}", "nothing was changed"
        ) from error
    if replacing:
        shutil.rmtree(retired)
