"""Writing a checkpoint: the destination, staging, and checks of the plan and of the output."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard import formats, units
from reshard.checks.identity import check_identity
from reshard.commands.lines import LISTED
from reshard.commands.output_options import OutputOptions
from reshard.commands.output_report import OutputReport, WriteResult
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter, open_progress, read_trusted
from reshard.core.manifest import (
    WEIGHT_KINDS,
    Entry,
    Manifest,
    Origin,
    Skeleton,
    SourceFile,
)
from reshard.core.manifest import check as check_manifest
from reshard.engine.move import job as jobs
from reshard.engine.move.journal import Journal
from reshard.engine.move.outcome import Outcome
from reshard.engine.move.unfinished import Unfinished
from reshard.engine.output import commit
from reshard.engine.output.destination import check_destination, check_suffix
from reshard.engine.planning.extents import Extent, FileIndex
from reshard.engine.planning.planner import Plan
from reshard.errors import DifferentError, ExistsError
from reshard.system.paths import as_path, is_remote, resolve
from reshard.system.ranks.team import (
    broadcast_text,
    check_ranks_agree,
)
from reshard.tensors import replicas

if TYPE_CHECKING:
    from reshard.commands.forecast import Forecast
    from reshard.html.page import Page

R = TypeVar("R", bound=OutputReport)
CheckOutput = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[R]):
    """A planned output, of which nothing is written yet.

    Args:
        manifest: the source of the copies.
        shown: the source as the page of the report shows it.
        check: reads the headers of the written files and compares them with the plan.
        save_id: what the files state about the source and the options they were written with;
            empty: nothing.
        stores_masters: whether the output has master weights beside the module's.
        worker_nbytes: the memory that a worker needs to compute values (means, products, codes),
            besides its buffers, in bytes.
    """

    manifest: Manifest
    shown: Manifest
    skeleton: Skeleton
    plan: Plan
    report: R
    check: CheckOutput
    save_id: str = ""
    stores_masters: bool = False
    worker_nbytes: int = 0


def convert(
    sources: Sequence[Path],
    destination: str | Path,
    options: OutputOptions,
    prepare: Callable[[Manifest, Path, list[str]], Job[R]],
    *,
    kinds: Sequence[str] | None,
    beside: Sequence[Path] = (),
    is_stamped: bool = False,
    meter: Meter | None = None,
) -> R:
    """Read a source, plan the output, write it except in a dry run, and report.

    Args:
        prepare: plans the output, given the source, the resolved destination, and notes on copies
            that were averaged.
        kinds: the kinds of tensors that are written; None for all.
        beside: further paths that are read and therefore must not be written to.
        is_stamped: whether the files state what they were written from. A destination that has
            this output already is then not an error, as with ``--resume``.
        meter: opens a progress display for a number of bytes.

    Raises:
        ReshardError: see its subclasses; the destination is then unchanged.
    """
    began = time.perf_counter()
    output = _resolve_destination(destination)
    check_page(options, [*sources, *beside], output)
    with _report_untouched(output):
        manifest, occupied = _open_source(sources, output, options, beside)
        if occupied is not None and not (is_stamped or options.resume):
            raise occupied
        identity = check_identity(manifest, options.trust, optimizer=kinds is None)
        with replicas.average_replicas(manifest, options.replicas, kinds) as (averaged, means):
            job = prepare(averaged, output, means)
            report = job.report
            report.set_destination(str(destination))
            report.identity = identity
            report.options = options.given()
            if occupied is not None:
                from reshard.commands.existing_output import is_written

                directory = output.parent if is_single_file(output) else output
                if not is_written(
                    job.plan, job.manifest.files, job.save_id, directory, options.on_overflow
                ):
                    raise occupied
                report.done = report.already_there = True
            elif not options.dry_run:
                written = write(job, output, options, meter)
                report.add_result(written, verified=options.verify)
                report.seconds = time.perf_counter() - began
            else:
                report.forecast = forecast_job(job, output, options)
            write_page(
                options,
                lambda: _build_page(report.to_dict(), job),
                written=report.destination if report.done else "",
            )
    return report


def forecast_job(job: Job[R], output: Path, options: OutputOptions) -> Forecast:
    """Forecast the memory, disk and time of writing a planned output."""
    from reshard.commands.forecast import forecast

    buffer_bytes = options.count_buffer_bytes(job.plan.window_bytes, job.worker_nbytes)
    return forecast(
        job.manifest.files.values(),
        output,
        bytes_read=job.report.bytes_read,
        bytes_written=job.skeleton.nbytes,
        # Reads may turn out to wait, and then bytes are read ahead.
        buffer_bytes=buffer_bytes + min(options.ahead_bytes, job.report.bytes_read),
        workers=options.budget()[0],
        verify=options.verify,
    )


def is_single_file(destination: str | Path) -> bool:
    """Return whether the name of a destination is that of one file, not of a directory."""
    return Path(destination).suffix in (".safetensors", *formats.PLAIN_SUFFIXES)


def _resolve_destination(destination: str | Path) -> Path:
    # A link to a file is replaced, not written through: in Hugging Face's cache it leads to a blob
    # that other snapshots share.
    path = as_path(destination)
    check_suffix(path)
    if not is_single_file(path) or is_remote(str(path)):
        return resolve(path)
    return resolve(path.parent) / path.name


@contextlib.contextmanager
def _report_untouched(destination: Path) -> Iterator[None]:
    # An interrupt during the reading of the source may be raised later, when writing has begun, if
    # it arrives while Python cleans up; the message must not depend on that.
    try:
        yield
    except KeyboardInterrupt as error:
        if not error.args:
            error.args = (f"nothing was written to {destination}",)
        raise


def _open_source(
    sources: Sequence[Path],
    destination: Path,
    options: OutputOptions,
    beside: Sequence[Path],
) -> tuple[Manifest, ExistsError | None]:
    """Also return why the destination is not free, if it may have this output already."""
    manifest = read_trusted(sources, options)
    occupied = None
    try:
        check_destination(
            destination,
            [*sources, as_path(manifest.origin.path), *beside],
            is_directory=not is_single_file(destination),
            overwrite=options.overwrite,
            resume=options.resume,
        )
    except ExistsError as error:
        if options.overwrite or is_remote(str(destination)):
            raise
        occupied = error
    return manifest, occupied


def write(
    job: Job[R], destination: Path, options: OutputOptions, meter: Meter | None = None
) -> WriteResult:
    """Write the planned files to a hidden directory, check them, and move them to the destination.

    Raises:
        ReshardError: the output could not be written; the destination is unchanged.
    """
    plan, files = job.plan, job.manifest.files
    team = options.team
    described = jobs.describe(files.values(), options.shaping_output(), plan.target)
    check_ranks_agree(team, job.manifest.origin.path, json.dumps(jobs.select_portable(described)))
    # The first rank compares the journals of all ranks with its own description.
    described = json.loads(broadcast_text(team, json.dumps(described)))
    claimed = commit.claim_output(
        destination,
        is_directory=not is_single_file(destination),
        overwrite=options.overwrite,
        resume=options.resume,
        team=team,
    )
    with (
        claimed as partial,
        open_progress(meter, plan.target.nbytes) as bar,
        team.abort_on_failure(),
    ):
        unfinished = _open_unfinished(partial, described, plan, files, options.move_options(bar))
        done, notes = _resume_or_clear(partial, unfinished, options)
        if done is not None:
            bar(done.nbytes)
        outcome = unfinished.finish(done)
        _check_written(outcome, plan.target, partial.output, options, job.check)
    if partial.leftover:
        notes.append(f"the output is complete, but {partial.path} {partial.leftover}")
    return WriteResult(outcome, done.nbytes if done else 0, notes)


def _open_unfinished(partial: commit.PartialOutput, *args: Any) -> Unfinished[Any]:
    if is_remote(str(partial.path)):
        from reshard.engine.move.receipts import Receipts

        return Receipts(partial, *args)
    return Journal(partial, *args)


def _resume_or_clear(
    partial: commit.PartialOutput, unfinished: Unfinished[Any], options: OutputOptions
) -> tuple[Outcome | None, list[str]]:
    team = options.team
    left = unfinished.read_progress() if options.resume and team.first else None
    is_resumed = broadcast_text(team, "on" if left else "")
    if not is_resumed:
        size = partial.used_bytes if team.first else 0
        if team.first:
            partial.clear()
        team.barrier()
        note = f"{units.show_bytes(size)} of an interrupted run were removed from {partial.path}"
        advice = "" if options.resume else "; --resume would have continued it"
        return None, [note + advice] if size else []
    left = left or Outcome()
    done = unfinished.check_progress(left)
    lost = left.nbytes - done.nbytes
    note = f"{units.show_bytes(lost)} of the interrupted run had changed and were written again"
    return done, [note] if lost > 0 else []


def _check_written(
    outcome: Outcome, skeleton: Skeleton, output: Path, options: OutputOptions, check: CheckOutput
) -> None:
    if outcome.overflowed and options.on_overflow == "error":
        _refuse_overflow(outcome, skeleton)
    if options.verify and options.team.first:
        for file in skeleton.files:
            if file.nbytes != (output / file.name).stat().st_size:
                raise DifferentError(file.name, "the size differs from the plan")
        check(output)


def _refuse_overflow(outcome: Outcome, skeleton: Skeleton) -> None:
    names = outcome.overflowed.most_common()
    shown = units.abridge([f"{fqn} ({count})" for fqn, count in names], LISTED)
    lost = units.counted(outcome.overflowed.total(), "finite value")
    written = [entry.dtype for entry in skeleton.entries if entry.fqn == names[0][0]]
    dtype = min(written, key=lambda dtype: dtype.itemsize)
    raise DifferentError(
        f"{dtype}",
        f"{lost} would become infinite: {shown}",
        "choose --dtype bf16 or fp32, keep those tensors with --keep-fp32 REGEX,"
        " or accept it with --on-overflow clamp|allow",
    )


def _build_page(document: Mapping[str, Any], job: Job[Any]) -> Page:
    from reshard.commands.inspect import Inspection
    from reshard.html import pages

    facts = Inspection(job.shown).to_dict()
    return pages.build_output_page(
        document, facts, job.shown, job.skeleton, has_masters=job.stores_masters
    )


def check_skeleton(skeleton: Skeleton) -> None:
    """Check that the planned files store every element once, like those of a source."""
    files = {file.name: SourceFile(file.name, file.nbytes) for file in skeleton.files}
    # Several entries of a skeleton may have the same name, so the keys are numbered.
    entries = {(e.kind, f"{e.fqn} ({e.dtype}, {n})"): e for n, e in enumerate(skeleton.entries)}
    check_manifest(Manifest(Origin("target", ""), entries, files, ordered=False))


def check_overlaps(skeleton: Skeleton) -> None:
    """Check that every planned chunk is inside its file and that no two chunks overlap."""
    sizes, index = {file.name: file.nbytes for file in skeleton.files}, FileIndex(skeleton)
    for file in index.files():
        placement = index.find_placement(file)
        if placement is None or not _are_apart(placement.ranges, sizes[file]):
            _check_overlaps(file, sizes[file], index.sort_extents(file), skeleton.entries)
        index.drop(file)


def _are_apart(ranges: list[tuple[int, int]], nbytes: int) -> bool:
    ends = [(0, 0), *sorted(ranges), (nbytes, nbytes)]
    return all(before[1] <= after[0] for before, after in pairwise(ends))


def _check_overlaps(
    file: str, nbytes: int, extents: list[Extent], entries: Sequence[Entry]
) -> None:
    begin, end, last = 0, 0, None
    for extent in extents:
        entry = entries[extent.entry]
        stop = extent.byte_offset + extent.nbytes
        if extent.byte_offset < 0 or stop > nbytes:
            raise DifferentError(file, f"{entry.fqn!r} would lie outside the file")
        same_bytes = (begin, end) == (extent.byte_offset, stop)
        if last is not None and same_bytes and _may_share_bytes(last, entry):
            continue
        if last is not None and extent.byte_offset < end:
            names = f"{last.fqn!r} and {entry.fqn!r}"
            raise DifferentError(file, f"{names} would overlap")
        begin, end, last = extent.byte_offset, stop, entry


def _may_share_bytes(one: Entry, other: Entry) -> bool:
    """Return whether two entries may be one value: a 0-d optimizer value of a flat parameter."""
    return (
        one.kind == other.kind
        and not one.shape
        and not other.shape
        and one.kind not in WEIGHT_KINDS
    )
