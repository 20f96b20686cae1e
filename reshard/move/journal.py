"""What of an unfinished output is on the disk for good, so that another run can go on from it.

The first line of a journal says which job it is of; every
other is what was seen of a batch of windows, whose bytes were made durable before the line was
written. A line that is cut off or damaged ends the journal: what it told of is done again.

Each process of a run appends to a journal of its own, and all that lie in the place are read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from stat import S_ISREG

from reshard.files import SourceFiles
from reshard.manifest import Skeleton, SourceFile
from reshard.move import job as jobs
from reshard.move.job import Job
from reshard.move.outcome import Outcome
from reshard.move.outputs import write_at
from reshard.move.records import crc_of
from reshard.move.share import pooled
from reshard.move.spans import FileSpan, Spans
from reshard.move.workers import spread
from reshard.output.partial import Partial, disk_error, sync
from reshard.ranks.team import ALONE, Progress, Team, own, unseen

BATCH_BYTES = 256 << 20
"""What a worker writes between two lines, so what a kill can cost it."""

NAME = "journal"


class Journal:
    """The journal of one process: a thread of its own makes batches durable and writes them down.

    Args:
        place: claimed; an earlier run's journal of this rank is gone on with.
        job: see `job.describe`.
        sources: reads of those that have checksums of their own are kept too, to be compared.
    """

    def __init__(
        self, place: Partial, job: Job, sources: Mapping[str, SourceFile], rank: int = 0
    ) -> None:
        self._place = place
        self._path = place.path / (f"{NAME}-{rank}" if rank else NAME)
        self._job = job
        self._checked = {path for path, file in sources.items() if file.has_checksums}
        self._batches: SimpleQueue[Outcome | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._stopped = False
        self._end: int | None = None  # where the next line goes; None: nothing is written yet

    def keep(self, seen: Outcome) -> Outcome:
        """Take over a batch once it is worth a line; see `outcome.Keep`.

        Raises:
            ReshardError: an earlier batch could not be made durable.
        """
        if self._error is not None:
            raise self._error
        if seen.nbytes < BATCH_BYTES:
            return seen
        self._batches.put(seen)
        return Outcome()

    @contextmanager
    def writing(self) -> Iterator[Journal]:
        """Write down what `keep` takes, until the end of the block; a signal does not wait for it.

        Raises:
            ReshardError: a batch could not be made durable.
        """
        thread = threading.Thread(target=self._work, name="journal")
        thread.start()
        try:
            yield self
        except Exception:  # what is done already is worth its line all the more
            raise
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._batches.put(None)
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (seen := self._batches.get()) is not None and not self._stopped:
                self._append(seen)
        except Exception as error:  # noqa: BLE001 - raised again in the threads that ask
            self._error = error

    def _append(self, seen: Outcome) -> None:
        """The files first, then the line that vouches for them."""
        output, text = self._place.output, jobs.line(seen.to_json(self._checked))
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


def left(place: Partial, job: Job) -> Outcome | None:
    """What the journals of earlier runs say is there; None where there is no journal.

    Where the cut of the windows has changed since, a value that was counted as made infinite or
    zero may be counted again.

    Raises:
        UsageError: they are of another job; the message says what is different.
    """
    seen, found = Outcome(), False
    for path in place.journals:
        lines = map(jobs.document, _whole_lines(path))
        begun_as = next(lines, None)
        if begun_as is None:
            continue
        jobs.check_same(place.destination, begun_as, job)
        found = True
        for document in lines:
            seen.add(Outcome.from_json(document))
    seen.nbytes = seen.windows.nbytes  # some may have been done twice, in windows of another cut
    place.kept_bytes = seen.nbytes
    return seen if found else None


def intact(
    seen: Outcome,
    place: Partial,
    skeleton: Skeleton,
    *,
    verify: bool,
    workers: int,
    team: Team = ALONE,
    progress: Progress = unseen,
) -> Outcome:
    """The same without windows that are not as they were written: no journal tells of those then.

    Args:
        seen: by the first rank, which tells the others.
        verify: read those that have a checksum; of others it is enough that the file is there at
            its size: what was read back when it was written, and flushed, is trusted.
    """
    said = seen.nbytes
    whole = _whole_files(place, skeleton) if team.first else set()
    there = Spans(span for span in seen.windows if span[0] in whole)
    seen = pooled(team, replace(seen, windows=there))
    if verify:
        mine = own(team, sorted(seen.windows, key=lambda span: span[:2]))
        there = _as_written(mine, place.output, workers, progress)
        seen = replace(seen, windows=pooled(team, Outcome(there)).windows)
    seen = replace(seen, nbytes=seen.windows.nbytes)
    if team.first and seen.nbytes < said:
        _tell_again(place, seen)
    return seen


def _tell_again(place: Partial, seen: Outcome) -> None:
    """Put one journal in the place of all: the next run must not trust what this one did not."""
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


@contextmanager
def _durable(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of a journal; what the block writes is on the disk for good when it ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole_files(place: Partial, skeleton: Skeleton) -> set[str]:
    """Those of the output that are there at their size; any others are removed."""
    whole: set[str] = set()
    for file in skeleton.files:
        path = place.output / file.name
        status = path.lstat() if os.path.lexists(path) else None
        if status is None:
            continue
        if S_ISREG(status.st_mode) and (status.st_size, status.st_nlink) == (file.nbytes, 1):
            whole.add(file.name)
        else:
            path.unlink()
    return whole


def _as_written(
    windows: Iterable[FileSpan], directory: Path, workers: int, progress: Progress
) -> Spans:
    same: list[FileSpan] = []
    with SourceFiles() as pool:

        def check(window: FileSpan) -> None:
            name, offset, nbytes, crc = window
            if crc is None or crc == crc_of(pool, str(directory / name), offset, nbytes):
                same.append(window)

        spread(windows, lambda: check, workers, lambda window: progress(window[2]))
    return Spans(same)


def _whole_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from jobs.whole(file)
