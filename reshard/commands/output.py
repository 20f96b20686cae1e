"""What every command that writes shares: its options, staging, a look at what was made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import formats, units
from reshard.commands.inspect import Inspection
from reshard.commands.lines import LISTED
from reshard.commands.options import OutputOptions
from reshard.commands.reading import Meter, metered, trusted
from reshard.errors import DifferentError
from reshard.manifest import Manifest, Skeleton
from reshard.move import job as jobs
from reshard.move.outcome import Outcome
from reshard.move.unfinished import Unfinished, open_unfinished
from reshard.output import commit
from reshard.output.destination import check_destination
from reshard.paths import as_path, is_remote
from reshard.plan.planner import Plan
from reshard.ranks.team import (
    broadcast_text,
    check_ranks_agree,
    select_share,
)

if TYPE_CHECKING:
    from reshard.html.page import Page

Check = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What came of writing an output.

    Args:
        resumed_bytes: what an interrupted run had done of it.
        notes: what else a user should know.
    """

    outcome: Outcome
    resumed_bytes: int
    notes: list[str]


def is_file(destination: str | Path) -> bool:
    """Whether output goes into one file there: its name says so, as no directory's does."""
    return Path(destination).suffix in (".safetensors", *formats.PLAIN_SUFFIXES)


def resolved(destination: str | Path) -> Path:
    """Return the path that output gets: links on the way to it are followed.

    So is a link that stands for a directory. One that stands for a file is replaced, not written
    through: in Hugging Face's cache it leads to a blob that other snapshots share.
    """
    path = as_path(destination)
    if not is_file(path) or is_remote(str(path)):
        return path.resolve()
    return path.parent.resolve() / path.name


@contextlib.contextmanager
def untouched(destination: Path) -> Iterator[None]:
    """Let an interrupt say that nothing was written, unless it says already what was.

    One that comes while the source is read may be raised at once or, where Python is cleaning up,
    a little later, when the output has begun: the message must not depend on that.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if not error.args:
            error.args = (f"nothing was written to {destination}",)
        raise


def opened(
    sources: Sequence[Path],
    destination: Path,
    options: OutputOptions,
    *,
    is_directory: bool,
    beside: Sequence[Path] = (),
) -> Manifest:
    """The checkpoint that is asked for, once it is known to be safe and its destination free.

    Args:
        beside: what else is read, and so is never written to.

    Raises:
        ReshardError: the source cannot be read or trusted, or the destination is taken.
    """
    manifest = trusted(sources, options)
    check_destination(
        destination,
        [*sources, as_path(manifest.origin.path), *beside],
        is_directory=is_directory,
        overwrite=options.overwrite,
        resume=options.resume,
    )
    return manifest


def write(
    plan: Plan,
    manifest: Manifest,
    destination: Path,
    options: OutputOptions,
    *,
    is_directory: bool,
    look: Check,
    meter: Meter | None = None,
) -> Written:
    """Write the target's files to a partial place, check them, and move them to theirs.

    Args:
        look: reads the written files' own headers, as a stranger would.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    team = options.team
    job = jobs.describe(manifest.files.values(), options.shaping_output(), plan.target)
    check_ranks_agree(team, manifest.origin.path, json.dumps(job))
    claimed = commit.claim_output(
        destination,
        is_directory=is_directory,
        overwrite=options.overwrite,
        resume=options.resume,
        team=team,
    )
    with claimed as place, metered(meter, plan.target.nbytes) as bar, team.abort_on_failure():
        growing = open_unfinished(place, job, plan, manifest.files, options.move_options(bar))
        done, notes = _begun(place, growing, options)
        if done is not None:
            bar(done.nbytes)
        outcome = growing.finish(done)
        jobs.check_sources(job, select_share(team, list(manifest.files.values())))
        _check_written(outcome, plan.target, place.output, options, look)
    return Written(outcome, done.nbytes if done else 0, notes)


def _begun(
    place: commit.PartialOutput, growing: Unfinished, options: OutputOptions
) -> tuple[Outcome | None, list[str]]:
    """What an interrupted run had done, if it is to be gone on with, and what to say of it."""
    team = options.team
    left = growing.read_progress() if options.resume and team.first else None
    goes_on = broadcast_text(team, "on" if left else "")
    if not goes_on:
        size = place.used_bytes if team.first else 0
        if team.first:
            place.clear()
        team.barrier()
        gone = f"{units.show_bytes(size)} of an interrupted run were removed from {place.path}"
        return None, [gone if options.resume else f"{gone}: --resume goes on"] if size else []
    left = left or Outcome()
    done = growing.check_progress(left)
    lost = left.nbytes - done.nbytes
    again = f"{units.show_bytes(lost)} of it were not as they had been written: done again"
    return done, [again] if lost > 0 else []


def _check_written(
    outcome: Outcome, skeleton: Skeleton, output: Path, options: OutputOptions, look: Check
) -> None:
    if outcome.overflowed and options.on_overflow == "error":
        _refuse_overflow(outcome, skeleton)
    if options.verify and options.team.first:
        for file in skeleton.files:
            if file.nbytes != (output / file.name).stat().st_size:
                raise DifferentError(file.name, "has another size than planned")
        look(output)


def _refuse_overflow(outcome: Outcome, skeleton: Skeleton) -> None:
    names = outcome.overflowed.most_common()
    shown = ", ".join(f"{fqn} ({count})" for fqn, count in names[:LISTED])
    more = f" and {len(names) - LISTED} more tensors" if len(names) > LISTED else ""
    written = [entry.dtype for entry in skeleton.entries if entry.fqn == names[0][0]]
    dtype = min(written, key=lambda dtype: dtype.itemsize)
    raise DifferentError(
        f"{dtype}",
        f"{sum(outcome.overflowed.values())} finite values would become infinite: {shown}{more}",
        "choose --dtype bf16 or fp32, keep those tensors with --keep-fp32 REGEX,"
        " or accept it with --on-overflow clamp|allow",
    )


def page_of(document: Mapping[str, Any], manifest: Manifest, skeleton: Skeleton) -> Page:
    """The page of a report: what came in, what went out.

    Args:
        document: ``to_json()`` of the report.
    """
    from reshard.html import pages

    return pages.written(document, Inspection(manifest).to_json(), manifest, skeleton)
