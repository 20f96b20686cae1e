"""The journal of an unfinished output: what is durable on the disk, so that a run can resume.

The first line of a journal describes its job. Every other line is the outcome of a batch of windows
whose bytes were made durable before the line was written. A line that is cut off or damaged ends
the journal, and the work that it described is repeated.

Each process of a run appends to its own journal; a later run reads all journals.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from stat import S_ISREG
from typing import Any

from reshard.engine.move import job as jobs
from reshard.engine.move.distribution import merge_across_ranks
from reshard.engine.move.execute import execute
from reshard.engine.move.outcome import Outcome
from reshard.engine.move.records import compute_crc
from reshard.engine.move.spans import FileSpan, Spans
from reshard.engine.move.unfinished import Unfinished
from reshard.engine.output.destination import check_space
from reshard.engine.output.files import write_at
from reshard.engine.output.local import LocalPartial, build_disk_error, sync
from reshard.system.files import OpenFiles
from reshard.system.ranks.team import select_share
from reshard.system.threads import ThreadGroup, parallel_for

BATCH_BYTES = 256 << 20
"""Bytes that a worker writes between two lines; a kill loses at most this much work of it."""

NAME = "journal"


class Journal(Unfinished[LocalPartial]):
    """The journal of one process, with a thread that makes batches durable and records them.

    Progress is read from the journals of all processes; this one appends to its own.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rank = self._options.team.rank
        self._path = self._partial.path / (f"{NAME}-{rank}" if rank else NAME)
        self._batches: SimpleQueue[Outcome | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._stopped = False
        self._end: int | None = None  # offset of the next line; None before the first write

    def read_progress(self) -> Outcome | None:
        """Return what the journals of earlier runs record, or None if there is no journal.

        If the windows were cut differently in the meantime, a value that became infinite or zero
        may be counted twice.

        Raises:
            UsageError: the journals belong to another job; the message says what differs.
        """
        seen, has_journal = Outcome(), False
        for path in self._partial.journals:
            lines = map(jobs.parse_line, _read_valid_lines(path))
            recorded_job = next(lines, None)
            if recorded_job is None:
                continue
            jobs.check_same_job(self._partial.destination, recorded_job, self._job)
            has_journal = True
            for document in lines:
                seen.add(Outcome.from_json(document))
        seen.nbytes = seen.windows.nbytes  # windows that were cut differently may overlap
        self._partial.resumable_bytes = seen.nbytes
        return seen if has_journal else None

    def check_progress(self, left: Outcome) -> Outcome:
        """Return the part of `left` that is still intact, and rewrite the journals to match.

        With `verify`, windows that have a checksum are read again. For the others it is enough that
        the file exists at its full size: they were read back and flushed when they were written.
        """
        team = self._options.team
        # Only the first rank has records and looks for files; the
        # merge gives its list to the others.
        complete = self._find_complete_files() if team.first else set()
        present = Spans(span for span in left.windows if span[0] in complete)
        seen = merge_across_ranks(team, replace(left, windows=present))
        if self._options.verify:
            # Sorted, so that all ranks divide the same list.
            mine = select_share(team, sorted(seen.windows, key=lambda span: span[:2]))
            seen = replace(
                seen, windows=merge_across_ranks(team, Outcome(self._find_intact(mine))).windows
            )
        seen = replace(seen, nbytes=seen.windows.nbytes)
        if team.first and seen.nbytes < left.nbytes:
            self._rewrite(seen)
        return seen

    def finish(self, done: Outcome | None) -> Outcome:
        """Fill the missing windows and record the progress.

        Raises:
            ReshardError: as in `execute.execute`, or the output could not be made durable.
        """
        partial, options = self._partial, self._options
        if options.team.first:
            check_space(partial.destination, self._plan.target.nbytes - partial.used_bytes)
        with ThreadGroup() as threads:
            try:
                threads.start(self._work, name="journal")
                outcome = execute(
                    self._plan, self._sources, partial.output, options, done=done, keep=self._keep
                )
                self._batches.put(None)
                threads.wait()
            except Exception:  # the thread still records what is done, for a later run
                raise
            except BaseException:
                self._stopped = True  # after a signal, do not wait for the thread
                raise
            finally:
                # After an error this ends the thread; otherwise it has ended already.
                self._batches.put(None)
        return outcome

    def _keep(self, seen: Outcome) -> Outcome:
        if self._error is not None:
            # The workers stop as soon as progress can no longer be recorded.
            raise self._error
        if seen.nbytes < BATCH_BYTES:
            return seen
        self._batches.put(seen)
        return Outcome()

    def _work(self) -> None:
        try:
            while (seen := self._batches.get()) is not None and not self._stopped:
                self._append(seen)
        except Exception as error:
            self._error = error
            raise

    def _append(self, seen: Outcome) -> None:
        output, text = self._partial.output, jobs.format_line(seen.to_json())
        sync(output / name for name in seen.windows.files)
        # All files exist before the first window is written, so their names are made durable once.
        first = self._end is None
        if first:  # also the names of the files, which their directories store
            sync([output, *(path for path in output.rglob("*") if path.is_dir())])
        try:
            with _durable(self._path) as descriptor:
                if self._end is None:
                    # A resumed run appends to the valid lines of the last one.
                    self._end = sum(len(line) for line in _read_valid_lines(self._path))
                    os.ftruncate(descriptor, self._end)  # drop a line that was cut off
                if not self._end:
                    text = jobs.format_line(self._job) + text
                write_at(descriptor, memoryview(text), self._end)
        except OSError as error:
            raise build_disk_error(self._path, error) from error
        self._end += len(text)
        if first:
            # A crash must not lose the name of the journal, or that of the hidden directory.
            sync([self._partial.path, self._partial.path.parent])
        self._partial.resumable_bytes += seen.nbytes

    def _rewrite(self, seen: Outcome) -> None:
        """Replace all journals by one, so that the next run does not trust damaged windows."""
        partial = self._partial
        first_lines = (next(_read_valid_lines(path), None) for path in partial.journals)
        job_line = next(line for line in first_lines if line is not None)
        new = partial.path / f"{NAME}-new"  # until it is renamed, its records only repeat others
        try:
            with _durable(new, os.O_TRUNC) as descriptor:
                write_at(descriptor, memoryview(job_line + jobs.format_line(seen.to_json())), 0)
            new.replace(partial.path / NAME)
            # The first journal in sorted order is the new one.
            for path in partial.journals[1:]:
                path.unlink()
        except OSError as error:
            raise build_disk_error(new, error) from error
        sync([partial.path])

    def _find_complete_files(self) -> set[str]:
        complete: set[str] = set()
        for file in self._plan.target.files:
            path = self._partial.output / file.name
            status = path.lstat() if os.path.lexists(path) else None
            if status is None:
                continue
            # A file with a second name is not written to: the change
            # would show under that name as well.
            if S_ISREG(status.st_mode) and (status.st_size, status.st_nlink) == (file.nbytes, 1):
                complete.add(file.name)
            else:
                path.unlink()
        return complete

    def _find_intact(self, windows: Iterable[FileSpan]) -> Spans:
        intact: list[FileSpan] = []
        with OpenFiles(os.O_RDONLY) as pool:

            def check(window: FileSpan) -> None:
                name, offset, nbytes, crc = window
                path = str(self._partial.output / name)
                if crc is None or crc == compute_crc(pool, path, offset, nbytes):
                    intact.append(window)

            parallel_for(windows, lambda: check, self._options.workers)
        return Spans(intact)


@contextmanager
def _durable(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a journal for the block; what the block writes is durable when it ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_valid_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from jobs.iterate_valid_lines(file)
