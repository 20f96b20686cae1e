"""Output appears whole or not at all: a partial place beside the destination, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from reshard import signals, units
from reshard.errors import ExistsError, ReshardError, ResourceError, UsageError, is_outside
from reshard.output.partial import Partial, sync
from reshard.paths import is_remote
from reshard.ranks.team import ALONE, Team

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
    if is_remote(str(real)):
        _remote().check_bucket(real)
    elif not real.parent.is_dir():
        raise UsageError(destination, f"there is no directory {real.parent}", "create it first")
    if destination.is_dir() and is_directory:
        _check_directory(destination, overwrite=overwrite)
    elif destination.is_dir():
        raise ExistsError(destination, "is a directory, and the output is one file", "remove it")
    elif _is_there(destination) and (is_directory or not destination.is_file()):
        raise ExistsError(destination, "exists and is no directory", "choose another name")
    elif _is_there(destination) and not overwrite:
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


def _remote() -> ModuleType:
    from reshard.remote import writing

    return writing


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def check_space(destination: Path, nbytes: int) -> None:
    """Refuse what cannot fit.

    Raises:
        ResourceError: the file system has less free space than ``nbytes``.
    """
    if is_remote(str(destination)):
        return  # its store has room; `move.upload` looks at what it needs here
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
    if is_remote(str(destination)):
        with _remote().staged(
            destination, is_directory=is_directory, overwrite=overwrite
        ) as output:
            yield output
        return
    with claimed(destination, is_directory=is_directory, overwrite=overwrite) as place:
        place.clear()
        yield place.output


@contextlib.contextmanager
def claimed(
    destination: Path,
    *,
    is_directory: bool,
    overwrite: bool,
    resume: bool = False,
    team: Team = ALONE,
) -> Iterator[Partial]:
    """The partial place, whose output becomes ``destination`` when the block ends well.

    What an earlier process left in it is there still. It stays for a later run where the block
    says that this is worth it, and only time or the machine was lacking; else it goes.

    Args:
        resume: whether the user wants what an earlier run left; then even a full disk leaves it.
        team: the first rank claims it and publishes, the others take part.

    Raises:
        ExistsError: another process is writing there, or the destination is taken.
    """
    place = Partial(destination.resolve().parent / destination.name)
    if not team.first:
        with _joined(place, team):
            yield place
        return
    published = False
    if resume and place.journals:
        place.kept_bytes = place.held_bytes  # until they are read
    try:
        place.claim()
        if not overwrite:
            _check_free(place.destination)
        team.meet()  # claimed
        yield place
        sync([*place.output.rglob("*"), place.output])
        team.meet()  # written
        with signals.deferred():
            place.end_journals()
            _publish(place, is_directory=is_directory, overwrite=overwrite)
            sync([place.path.parent])
            published = True
        team.meet()
    except BaseException as error:
        if team.size > 1 and place.journals:
            place.kept_bytes = place.held_bytes  # by the other ranks too
        if published:
            _tell(error, f"{destination} was written before")
            _remove(place)
        elif resume and isinstance(error, UsageError):
            pass  # what cannot be gone on with so may be otherwise
        elif place.kept_bytes and _is_outside(error, resume=resume):
            size = units.show_bytes(place.kept_bytes)
            _tell(
                error,
                f"nothing was written to {destination}; {size} that are done stay in"
                f" {place.path}: --resume goes on with them",
            )
        else:
            _tell(error, f"nothing was written to {destination}")
            _remove(place)
        raise
    else:
        _remove(place)
    finally:
        place.release()


@contextlib.contextmanager
def _joined(place: Partial, team: Team) -> Iterator[None]:
    """The part of any rank but the first."""
    try:
        team.meet()  # claimed
        place.join(team.rank)
        yield
        sync([*place.output.rglob("*"), place.output])  # what this machine has in its own cache
    finally:
        place.release()
    team.meet()  # written
    team.meet()  # published


def _remove(place: Partial) -> None:
    """Remove it as far as that goes: what stays is met by the next run at this destination."""
    with contextlib.suppress(OSError):
        place.remove()


def _is_outside(error: BaseException, *, resume: bool) -> bool:
    """As `is_outside`; a full disk is in the way of others too."""
    full = getattr(error, "exit_code", None) == ResourceError.exit_code
    return resume if full else is_outside(error)


def _tell(error: BaseException, what: str) -> None:
    """Let the error's message say what became of the output."""
    if isinstance(error, ReshardError) and "--resume" in what:
        error.remedy = f"{error.remedy}; {what}" if error.remedy else what
    elif isinstance(error, (KeyboardInterrupt, MemoryError)):
        error.args = (what,)


def _check_free(destination: Path) -> None:
    """As `check_destination`, once nobody else can be writing there."""
    taken = os.path.lexists(destination)
    if taken and not (destination.is_dir() and not any(destination.iterdir())):
        raise ExistsError(
            destination, "was created by another process meanwhile", "nothing was changed"
        )


def _publish(place: Partial, *, is_directory: bool, overwrite: bool) -> None:
    if is_directory:
        _publish_directory(place, overwrite=overwrite)
    else:
        made = place.output / place.destination.name
        _publish_file(made, place.destination, overwrite=overwrite)


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


def _publish_directory(place: Partial, *, overwrite: bool) -> None:
    umask = os.umask(0)
    os.umask(umask)
    place.output.chmod(0o777 & ~umask)
    destination = place.destination
    replacing = overwrite and destination.exists()
    if replacing and _exchange(place.output, destination):
        return
    try:
        if replacing:
            destination.rename(place.replaced)
        place.output.rename(destination)
    except OSError as error:
        if replacing and place.replaced.exists() and not destination.exists():
            place.replaced.rename(destination)
        raise ExistsError(
            destination, f"could not be put in place: {error.strerror}", "nothing was changed"
        ) from error


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, where the system can: Linux, on most local file systems."""
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and (
        rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
    )
