"""Commit of an output: it grows in a hidden directory beside the destination, then is renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from reshard import units
from reshard.engine.output.local import LocalPartial, build_disk_error
from reshard.errors import ReshardError, ResourceError, UsageError, has_external_cause
from reshard.system import signals
from reshard.system.paths import is_remote
from reshard.system.ranks.team import ALONE, Team

if TYPE_CHECKING:
    from reshard.engine.output.remote import RemotePartial
    from reshard.system.remote.path import RemotePath

PartialOutput: TypeAlias = "LocalPartial | RemotePartial"
"""The hidden directory in which an output grows, on a disk or in an object store."""

_WRITTEN = "{} was already written completely"


@contextlib.contextmanager
def stage_output(destination: Path, *, is_directory: bool, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary directory whose content becomes ``destination`` when the block succeeds.

    For a single file, the block must leave one file with the destination's name in the directory.
    After any exception, the temporary directory is removed and the destination is unchanged.

    Raises:
        ResourceError: the temporary directory could not be removed; the destination is complete.
    """
    with claim_output(destination, is_directory=is_directory, overwrite=overwrite) as partial:
        partial.clear()
        yield partial.output
    if partial.leftover:
        raise ResourceError(partial.path, partial.leftover, _WRITTEN.format(partial.destination))


def write_file(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a small file, whole or not at all.

    Raises:
        ExistsError: the file exists, and ``overwrite`` is off.
        ReshardError: the file cannot be written.
    """
    with stage_output(path, is_directory=False, overwrite=overwrite) as staging:
        (staging / path.name).write_bytes(data)


@contextlib.contextmanager
def claim_output(
    destination: Path,
    *,
    is_directory: bool,
    overwrite: bool,
    resume: bool = False,
    team: Team = ALONE,
) -> Iterator[PartialOutput]:
    """Yield the partial output, which becomes ``destination`` when the block succeeds.

    The output is then complete, also if `leftover` states that something could not be removed.
    It may contain what an earlier process has left. After an error it is kept for a later run if
    the block has recorded progress (``resumable_bytes``) and if the cause is outside of reshard
    (an interrupt, the network, a disk); otherwise it is removed.

    Args:
        destination: the final path.
        is_directory: whether the output is a directory rather than one file.
        overwrite: whether to replace an existing destination.
        resume: whether the user passed --resume; progress is then kept even if the disk is full.
        team: the first rank claims and publishes the output, the others join it.

    Raises:
        ExistsError: another process is writing there, or the destination exists already.
    """
    partial = _open_partial(destination)
    # An interrupt is raised between two pieces of work only, so never
    # between two steps of a commit.
    with signals.checked():
        if not team.first:
            with _join_output(partial, team, resume=resume):
                yield partial
            return
        if resume:
            partial.resumable_bytes = partial.recorded_bytes  # until the records are read
        try:
            partial.claim()
            if not overwrite:
                partial.check_destination_free()
            team.barrier()  # claimed
            yield partial
            partial.make_durable()
            # The name must not become durable before the bytes of every rank are.
            team.barrier()  # written
            partial.publish(is_directory=is_directory, overwrite=overwrite)
            signals.add_message(_WRITTEN.format(partial.destination))
            team.barrier()  # published
            _remove(partial)
        except BaseException as raised:
            error = raised
            if isinstance(raised, OSError):  # of a call that has no message of its own
                error = build_disk_error(partial.destination, raised)
                error.__cause__ = raised
            if not _is_kept(partial, error, team, resume=resume):
                _remove(partial)
                if partial.leftover:
                    _append_remedy(error, f"{partial.path} {partial.leftover}", always=True)
            if error is raised:
                raise
            raise error from raised
        finally:
            _release(partial)


def _open_partial(destination: Path) -> PartialOutput:
    # A link at the destination is replaced itself, not the file or directory that it refers to.
    real = destination.parent.resolve() / destination.name
    if not is_remote(str(real)):
        return LocalPartial(real)
    from reshard.engine.output.remote import RemotePartial

    return RemotePartial(cast("RemotePath", real))


@contextlib.contextmanager
def _join_output(partial: PartialOutput, team: Team, *, resume: bool) -> Iterator[None]:
    try:
        # The barriers here pair with those of the first rank, in `claim_output`.
        team.barrier()  # claimed
        partial.join(team.rank)
        yield
        partial.make_durable()
    except BaseException:
        # An error of the cleanup must not hide the one that ended the block.
        with signals.deferred(), contextlib.suppress(OSError, ReshardError):
            partial.discard_share(resume=resume)
        raise
    finally:
        _release(partial)
    team.barrier()  # written
    team.barrier()  # published


def _is_kept(partial: PartialOutput, error: BaseException, team: Team, *, resume: bool) -> bool:
    """Return whether a failed run keeps its partial output, and add its fate to the error."""
    there = partial.destination
    if partial.published:
        _append_remedy(error, _WRITTEN.format(there), instead=True)
        return False
    if partial.only_copy or (resume and isinstance(error, UsageError)):
        return True  # the next run can publish it, or resume it with the right options
    if team.size > 1:
        # Count what all ranks have recorded. If the store cannot be reached, this rank's number
        # remains.
        with contextlib.suppress(ReshardError):
            partial.resumable_bytes = partial.recorded_bytes
    if partial.resumable_bytes and _has_external_cause(error, resume=resume):
        size = units.show_bytes(partial.resumable_bytes)
        if resume or partial.keeps_without_resume:
            advice = (
                f"{size} of finished output are kept in {partial.path}; pass --resume to continue"
            )
            _append_remedy(error, f"nothing was written to {there}; {advice}")
            return True
    _append_remedy(error, f"nothing was written to {there}")
    return False


def _remove(partial: PartialOutput) -> None:
    with signals.deferred():
        try:
            partial.remove()
        except (OSError, ReshardError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.problem
            partial.leftover = f"could not be removed ({reason}): remove it, or the next run does"


def _release(partial: PartialOutput) -> None:
    """Release the claim. An error changes nothing: it also ends with the process, or expires."""
    with signals.deferred(), contextlib.suppress(OSError, ReshardError):
        partial.release()


def _has_external_cause(error: BaseException, *, resume: bool) -> bool:
    # Without --resume, output that fills a disk must not stay: it is in the way of others.
    full = getattr(error, "exit_code", None) == ResourceError.exit_code
    return resume if full else has_external_cause(error)


def _append_remedy(
    error: BaseException, what: str, *, instead: bool = False, always: bool = False
) -> None:
    # `instead` replaces the remedy; `always` adds also where another run would change nothing.
    if isinstance(error, KeyboardInterrupt):
        # `signals.add_message` may have added the same text.
        error.args = (*error.args, *({what} - {*error.args}))
    elif isinstance(error, MemoryError):
        error.args = (what,)
    elif not isinstance(error, ReshardError):
        return
    elif instead or always or "--resume" in what or has_external_cause(error):
        known = "" if instead or what in error.remedy else error.remedy
        error.remedy = f"{known}; {what}" if known else what
