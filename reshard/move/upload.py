"""Executing a plan into an object store: each output file is made on this machine, then sent.

Formats keep checksums before the bytes that they are of, so that a file must be whole before its
first byte can go. One file is sent while the next is filled: the disk holds two of them, however
many there are.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from reshard import signals
from reshard.errors import ResourceError
from reshard.files import SourceFiles
from reshard.manifest import OutputFile, SourceFile
from reshard.move.execute import Run, check_records
from reshard.move.options import MoveOptions
from reshard.move.outcome import Outcome
from reshard.move.outputs import OutputFiles
from reshard.move.share import Batch, Share, pooled
from reshard.move.spans import Spans
from reshard.output.temporary import temporary
from reshard.plan.planner import Plan
from reshard.remote.path import RemotePath
from reshard.remote.writing import check_read_back, upload
from reshard.threads import ThreadGroup

_FILES_AT_ONCE = 8

Arrived = Callable[[OutputFile, Outcome], None]
"""Told of a file that has arrived, and of what was seen when it was made."""


def write(
    plan: Plan,
    sources: Mapping[str, SourceFile],
    directory: RemotePath,
    options: MoveOptions,
    *,
    done: Outcome | None,
    arrived: Arrived,
) -> Outcome:
    """As `execute.execute`, into an object store; each rank makes whole files.

    Args:
        done: what an earlier run saw of files that are there already.
        arrived: called by the thread that has sent a file.

    Raises:
        ReshardError: a file cannot be sent; else as there.
    """
    before, target, team = done or Outcome(), plan.target, options.team
    there = set(before.windows.files)
    sizes = {file.name: file.nbytes for file in target.files if file.name not in there}
    mine = Share(team, sum(sizes.values())).files(sizes)
    seen = Outcome()
    with (
        SourceFiles() as pool,
        temporary() as here,
        OutputFiles(Path(here)) as made,
        ThreadGroup() as threads,
        _Sending(threads, made, directory, verify=options.verify, arrived=arrived) as sending,
    ):
        run = Run(pool, made, sources, target, options)
        files = {file.name: file for file in target.files if file.name in mine}
        sending.reserve(files.values())
        for file, batches in _by_file(plan.without_interleaving(), files):
            sending.make_room(file)
            run.create([file])
            part = run.fill(batches)
            stored = (each for each in target.checksums if each.file == file.name)
            run.store_checksums(stored, part)
            sending.send(file, part)
            seen.add(replace(part, windows=Spans()))
        sending.finish()
        outcome = pooled(team, seen)
        outcome.add(before)
        check_records(outcome.reads, sources, pool, options)
    team.barrier()
    directory.store.forget()  # what was listed before others had sent theirs
    return outcome


def _by_file(
    plan: Plan, files: Mapping[str, OutputFile]
) -> Iterator[tuple[OutputFile, Iterator[Batch]]]:
    """Every file with its windows; those of literals alone have none."""
    bare = dict(files)
    for name, group in groupby(plan.batches(), key=lambda batch: batch[0].file):
        if name in files:
            yield bare.pop(name), group
    yield from ((file, iter(())) for file in bare.values())


class _Sending:
    """Files on their way; what lies on this machine stays below twice the largest."""

    def __init__(
        self,
        threads: ThreadGroup,
        made: OutputFiles,
        directory: RemotePath,
        *,
        verify: bool,
        arrived: Arrived,
    ) -> None:
        self._crew = threads
        self._made = made
        self._directory = directory
        self._verify = verify
        self._arrived = arrived
        self._room = 0
        self._under_way: dict[str, int] = {}
        self._stop = threading.Event()

    def __enter__(self) -> _Sending:
        return self

    @signals.undivided
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """An error does not wait for files to be sent to their end."""
        if kind is not None:
            self._stop.set()

    def reserve(self, files: Collection[OutputFile]) -> None:
        """Have room for two of the largest.

        Raises:
            ResourceError: there is not.
        """
        self._room = 2 * max((file.nbytes for file in files), default=0)
        free = shutil.disk_usage(self._made.directory).free
        if free < self._room:
            raise ResourceError(
                self._made.directory,
                f"{self._room:,} bytes are needed for two output files, {free:,} are free",
                "free space, set TMPDIR to a larger disk, or ask for smaller files",
            )

    def make_room(self, file: OutputFile) -> None:
        """Wait until one more file fits."""
        while self._under_way and sum(self._under_way.values()) + file.nbytes > self._room:
            self._wait()

    def send(self, file: OutputFile, seen: Outcome) -> None:
        """Send a finished file in the background."""
        while len(self._under_way) >= _FILES_AT_ONCE:
            self._wait()
        self._under_way[file.name] = file.nbytes
        self._crew.start(partial(self._send, file, seen), name=file.name)

    def finish(self) -> None:
        """Wait for all."""
        while self._under_way:
            self._wait()

    def _send(self, file: OutputFile, seen: Outcome) -> None:
        self._made.forget(file.name)
        made, sent = self._made.directory / file.name, self._directory / file.name
        upload(made, sent, self._stop)
        if self._verify:
            check_read_back(made, sent, self._stop)
        self._arrived(file, seen)
        made.unlink()

    def _wait(self) -> None:
        del self._under_way[self._crew.wait()]
