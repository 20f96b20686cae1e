"""What of an unfinished output is on the disk for good, so that another run can go on from it.

The first line of a journal says which job it is of; every other is what was seen of a batch of
windows, whose bytes were made durable before the line was written. A line that is cut off or
damaged ends the journal: what it told of is done again.

Each process of a run appends to a journal of its own, and all that lie in the place are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from stat import S_ISREG

from reshard.files import SourceFiles
from reshard.manifest import SourceFile
from reshard.move import job as jobs
from reshard.move.execute import execute
from reshard.move.job import Job
from reshard.move.options import MoveOptions
from reshard.move.outcome import Outcome
from reshard.move.outputs import write_at
from reshard.move.records import crc_of
from reshard.move.share import pooled
from reshard.move.spans import FileSpan, Spans
from reshard.output.destination import check_space
from reshard.output.partial import Partial, disk_error, sync
from reshard.plan.planner import Plan
from reshard.ranks.team import select_share
from reshard.threads import ThreadGroup, parallel_for

BATCH_BYTES = 256 << 20
"""What a worker writes between two lines, so what a kill can cost it."""

NAME = "journal"


class Journal:
    """The journal of one process: a thread of its own makes batches durable and writes them down.

    An `unfinished.Unfinished`: what is left is that of all processes of an earlier run.

    Args:
        place: claimed, or joined; an earlier run's journal of this rank is gone on with.
        job: see `job.describe`.
    """

    def __init__(
        self,
        place: Partial,
        job: Job,
        plan: Plan,
        sources: Mapping[str, SourceFile],
        options: MoveOptions,
    ) -> None:
        self._place = place
        self._job = job
        self._plan = plan
        self._sources = sources
        self._options = options
        rank = options.team.rank
        self._path = place.path / (f"{NAME}-{rank}" if rank else NAME)
        self._batches: SimpleQueue[Outcome | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._stopped = False
        self._end: int | None = None  # where the next line goes; None: nothing is written yet

    def left(self) -> Outcome | None:
        """What the journals of earlier runs say is there; None where there is no journal.

        Where the cut of the windows has changed since, a value that was counted as made infinite
        or zero may be counted again.

        Raises:
            UsageError: they are of another job; the message says what is different.
        """
        seen, found = Outcome(), False
        for path in self._place.journals:
            lines = map(jobs.document, _whole_lines(path))
            begun_as = next(lines, None)
            if begun_as is None:
                continue
            jobs.check_same_job(self._place.destination, begun_as, self._job)
            found = True
            for document in lines:
                seen.add(Outcome.from_json(document))
        seen.nbytes = seen.windows.nbytes  # windows of another cut: some may have been done twice
        self._place.kept_bytes = seen.nbytes
        return seen if found else None

    def intact(self, left: Outcome) -> Outcome:
        """The same without windows that are not as they were written; journals forget those.

        To verify is to read what has a checksum. Of others it is enough that the file is there at
        its size: what was read back when it was written, and flushed, is trusted.
        """
        team = self._options.team
        whole = self._whole_files() if team.first else set()
        there = Spans(span for span in left.windows if span[0] in whole)
        seen = pooled(team, replace(left, windows=there))
        if self._options.verify:
            mine = select_share(team, sorted(seen.windows, key=lambda span: span[:2]))
            seen = replace(seen, windows=pooled(team, Outcome(self._as_written(mine))).windows)
        seen = replace(seen, nbytes=seen.windows.nbytes)
        if team.first and seen.nbytes < left.nbytes:
            self._tell_again(seen)
        return seen

    def finish(self, done: Outcome | None) -> Outcome:
        """Fill what is not there, and write down what is done.

        Raises:
            ReshardError: as `execute.execute`, or what is done could not be made durable.
        """
        place, options = self._place, self._options
        if options.team.first:
            check_space(place.destination, self._plan.target.nbytes - place.held_bytes)
        with ThreadGroup() as threads:
            try:
                threads.start(self._work, name="journal")
                outcome = execute(
                    self._plan, self._sources, place.output, options, done=done, keep=self._keep
                )
                self._batches.put(None)
                threads.wait()
            except Exception:  # what is done already is worth its line all the more
                raise
            except BaseException:
                self._stopped = True  # a signal does not wait for it
                raise
            finally:
                self._batches.put(None)
        return outcome

    def _keep(self, seen: Outcome) -> Outcome:
        """Take over a batch once it is worth a line; see `outcome.Keep`."""
        if self._error is not None:
            raise self._error
        if seen.nbytes < BATCH_BYTES:
            return seen
        self._batches.put(seen)
        return Outcome()

    def _work(self) -> None:
        """Write down what `_keep` takes, until there is no more."""
        try:
            while (seen := self._batches.get()) is not None and not self._stopped:
                self._append(seen)
        except Exception as error:
            self._error = error
            raise

    def _append(self, seen: Outcome) -> None:
        """The files first, then the line that vouches for them."""
        output, text = self._place.output, jobs.line(seen.to_json())
        sync(output / name for name in seen.windows.files)
        first = self._end is None
        if first:
            sync([output, *(path for path in output.rglob("*") if path.is_dir())])
        try:
            with _durable(self._path) as descriptor:
                if self._end is None:
                    self._end = sum(len(each) for each in _whole_lines(self._path))
                    os.ftruncate(descriptor, self._end)  # a tail that was cut off
                if not self._end:
                    text = jobs.line(self._job) + text
                write_at(descriptor, memoryview(text), self._end)
        except OSError as error:
            raise disk_error(self._path, error) from error
        self._end += len(text)
        if first:
            sync([self._place.path, self._place.path.parent])
        self._place.kept_bytes += seen.nbytes

    def _tell_again(self, seen: Outcome) -> None:
        """Put one journal in the place of all: the next run must not trust what this does not."""
        place = self._place
        whole = (next(_whole_lines(path), None) for path in place.journals)
        begun_as = next(line for line in whole if line is not None)
        new = place.path / f"{NAME}-new"  # until it is whole, it says what the others say too
        try:
            with _durable(new, os.O_TRUNC) as descriptor:
                write_at(descriptor, memoryview(begun_as + jobs.line(seen.to_json())), 0)
            new.replace(place.path / NAME)
            for path in place.journals[1:]:
                path.unlink()
        except OSError as error:
            raise disk_error(new, error) from error
        sync([place.path])

    def _whole_files(self) -> set[str]:
        """Those of the output that are there at their size; any others are removed."""
        whole: set[str] = set()
        for file in self._plan.target.files:
            path = self._place.output / file.name
            status = path.lstat() if os.path.lexists(path) else None
            if status is None:
                continue
            if S_ISREG(status.st_mode) and (status.st_size, status.st_nlink) == (file.nbytes, 1):
                whole.add(file.name)
            else:
                path.unlink()
        return whole

    def _as_written(self, windows: Iterable[FileSpan]) -> Spans:
        """Those that hold what their checksum says, or have none."""
        same: list[FileSpan] = []
        with SourceFiles() as pool:

            def check(window: FileSpan) -> None:
                name, offset, nbytes, crc = window
                path = str(self._place.output / name)
                if crc is None or crc == crc_of(pool, path, offset, nbytes):
                    same.append(window)

            parallel_for(windows, lambda: check, self._options.workers)
        return Spans(same)


@contextmanager
def _durable(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of a journal; what the block writes is on the disk for good when it ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from jobs.whole(file)
