"""Output appears whole or not at all: a partial place beside the destination, fsync, rename."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from reshard import signals, units
from reshard.errors import ReshardError, ResourceError, UsageError, is_outside
from reshard.output.local import Local
from reshard.paths import is_remote
from reshard.ranks.team import ALONE, Team

if TYPE_CHECKING:
    from reshard.remote.path import RemotePath


_WRITTEN = "{} was written before, whole"


class Place(Protocol):
    """Where an output grows, hidden beside its destination, on a disk or in an object store."""

    kept_bytes: int  # of the output, with which a later run could go on
    keeps_unasked: bool  # whether those stay without --resume too
    published: bool
    only_copy: bool  # whether what was to be replaced is gone, and the output has no name yet

    @property
    def destination(self) -> Path:
        """What it gets its name from."""

    @property
    def path(self) -> Path:
        """The place itself."""

    @property
    def output(self) -> Path:
        """Where the files lie in it."""

    @property
    def noted_bytes(self) -> int:
        """What a run has noted there as done for good."""

    @property
    def held_bytes(self) -> int:
        """What the output takes by now."""

    def claim(self) -> None:
        """Take it; refused where another process writes there."""

    def join(self, rank: int) -> None:
        """Take part in what the first rank has claimed."""

    def release(self) -> None:
        """Let another process have it."""

    def clear(self) -> None:
        """Remove what is in it; an empty output is there then."""

    def check_free(self) -> None:
        """Refuse a destination at which something has come meanwhile."""

    def settle(self) -> None:
        """Make the output durable."""

    def publish(self, *, is_directory: bool, overwrite: bool) -> None:
        """Give the output its name."""

    def give_up(self, *, resume: bool) -> None:
        """What a rank that is not the first does with its files when it fails."""

    def remove(self) -> None:
        """Remove it, if it was claimed."""


@contextlib.contextmanager
def staged(destination: Path, *, is_directory: bool, overwrite: bool) -> Iterator[Path]:
    """A temporary directory whose content becomes ``destination`` when the block ends well.

    For a file, the block must leave one file of the destination's name in it. On any exception
    the temporary directory goes and the destination is untouched.
    """
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
) -> Iterator[Place]:
    """The partial place, whose output becomes ``destination`` when the block ends well.

    What an earlier process left in it is there still. It stays for a later run where the block
    says that this is worth it, and only time or the machine was lacking; else it goes.

    Args:
        resume: whether the user wants what an earlier run left; then even a full disk leaves it.
        team: the first rank claims it and publishes, the others take part.

    Raises:
        ExistsError: another process is writing there, or the destination is taken.
    """
    place = _place(destination)
    if not team.first:
        with _joined(place, team, resume=resume):
            yield place
        return
    if resume:
        place.kept_bytes = place.noted_bytes  # until they are read
    try:
        place.claim()
        if not overwrite:
            place.check_free()
        team.barrier()  # claimed
        yield place
        place.settle()
        team.barrier()  # written
        place.publish(is_directory=is_directory, overwrite=overwrite)
        signals.say(_WRITTEN.format(place.destination))
        team.barrier()
        _remove(place)
    except BaseException as error:
        if _stays(place, error, team, resume=resume):
            raise
        _remove(place)
        raise
    finally:
        place.release()


def _place(destination: Path) -> Place:
    real = destination.parent.resolve() / destination.name
    if not is_remote(str(real)):
        return Local(real)
    from reshard.remote.partial import RemotePartial

    return RemotePartial(cast("RemotePath", real))


@contextlib.contextmanager
def _joined(place: Place, team: Team, *, resume: bool) -> Iterator[None]:
    """The part of any rank but the first."""
    try:
        team.barrier()  # claimed
        place.join(team.rank)
        yield
        place.settle()
    except BaseException:
        with contextlib.suppress(OSError, ReshardError):  # the first error has been told
            place.give_up(resume=resume)
        raise
    finally:
        place.release()
    team.barrier()  # written
    team.barrier()  # published


def _stays(place: Place, error: BaseException, team: Team, *, resume: bool) -> bool:
    """Whether a failed run leaves its place for another one; the error says what became of it."""
    there = place.destination
    if place.published:
        _tell(error, _WRITTEN.format(there), instead=True)
        return False
    if place.only_copy or (resume and isinstance(error, UsageError)):
        return True  # what cannot be gone on with so may be otherwise
    if team.size > 1:
        with contextlib.suppress(ReshardError):  # a store that is away: what this rank knows
            place.kept_bytes = place.noted_bytes  # by other ranks too
    if place.kept_bytes and _is_outside(error, resume=resume):
        size = units.show_bytes(place.kept_bytes)
        if resume or place.keeps_unasked:
            stay = f"{size} that are done stay in {place.path}: --resume goes on with them"
            _tell(error, f"nothing was written to {there}; {stay}")
            return True
    _tell(error, f"nothing was written to {there}")
    return False


@signals.undivided
def _remove(place: Place) -> None:
    """Remove it as far as that goes: what stays is met by the next run at this destination."""
    with contextlib.suppress(OSError, ReshardError):
        place.remove()


def _is_outside(error: BaseException, *, resume: bool) -> bool:
    """As `is_outside`; a full disk is in the way of others too."""
    full = getattr(error, "exit_code", None) == ResourceError.exit_code
    return resume if full else is_outside(error)


def _tell(error: BaseException, what: str, *, instead: bool = False) -> None:
    """Let the error's message say what became of the output."""
    if isinstance(error, KeyboardInterrupt):
        error.args = (*error.args, *({what} - {*error.args}))
    elif isinstance(error, MemoryError):
        error.args = (what,)
    elif not isinstance(error, ReshardError):
        return
    elif instead or "--resume" in what or is_outside(error):
        known = "" if instead or what in error.remedy else error.remedy
        error.remedy = f"{known}; {what}" if known else what
