"""Execution of a plan into an object store: each output file is built locally, then uploaded.

Some formats store checksums in front of the bytes that they describe, so a file must be complete
before its first byte can be sent. One file is uploaded while the next one is filled, so the local
disk stores at most two of them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from reshard.errors import ResourceError
from reshard.files import SourceFiles
from reshard.manifest import OutputFile, SourceFile
from reshard.move.execute import OutputBuilder, check_records
from reshard.move.options import MoveOptions
from reshard.move.outcome import Outcome
from reshard.move.outputs import OutputFiles
from reshard.move.share import Batch, Share, merge_across_ranks
from reshard.move.spans import Spans
from reshard.output.temporary import temporary
from reshard.plan.planner import Plan
from reshard.remote.path import RemotePath
from reshard.remote.writing import check_read_back, upload
from reshard.threads import ThreadGroup

_FILES_AT_ONCE = 8

OnArrival = Callable[[OutputFile, Outcome], None]
"""Called with a file that has been uploaded, and with the outcome of building it."""


def write(
    plan: Plan,
    sources: Mapping[str, SourceFile],
    directory: RemotePath,
    options: MoveOptions,
    *,
    done: Outcome | None,
    on_arrival: OnArrival,
) -> Outcome:
    """Execute a plan into an object store, like `execute.execute`; each rank writes whole files.

    Args:
        plan: the windows to fill.
        sources: the source files by path.
        directory: where to upload the files.
        options: threads, verification, and the team that shares the work.
        done: the outcome of an earlier run, whose files are in the store already.
        on_arrival: called by the thread that has uploaded a file.

    Raises:
        ReshardError: a file cannot be uploaded, or as in `execute.execute`.
    """
    before, target, team = done or Outcome(), plan.target, options.team
    stored = set(before.windows.files)
    sizes = {file.name: file.nbytes for file in target.files if file.name not in stored}
    mine = Share(team, sum(sizes.values())).files(sizes)
    seen = Outcome()
    with (
        SourceFiles() as pool,
        temporary() as here,
        OutputFiles(Path(here)) as local,
        ThreadGroup() as threads,
        _Uploads(
            threads, local, directory, verify=options.verify, on_arrival=on_arrival
        ) as uploads,
    ):
        builder = OutputBuilder(pool, local, sources, target, options)
        files = {file.name: file for file in target.files if file.name in mine}
        uploads.reserve(files.values())
        for file, batches in _iterate_files(plan.without_interleaving(), files):
            uploads.make_room(file)
            builder.create([file])
            part = builder.fill(batches)
            checksums = (each for each in target.checksums if each.file == file.name)
            builder.store_checksums(checksums, part)
            uploads.send(file, part)
            seen.add(replace(part, windows=Spans()))
        uploads.finish()
        outcome = merge_across_ranks(team, seen)
        outcome.add(before)
        check_records(outcome.reads, sources, pool, options)
    team.barrier()
    directory.store.forget()  # listings from before the other ranks uploaded their files
    return outcome


def _iterate_files(
    plan: Plan, files: Mapping[str, OutputFile]
) -> Iterator[tuple[OutputFile, Iterator[Batch]]]:
    """Yield every file with its batches; files that consist of literals have none."""
    bare = dict(files)
    for name, group in groupby(plan.batches(), key=lambda batch: batch[0].file):
        if name in files:
            yield bare.pop(name), group
    yield from ((file, iter(())) for file in bare.values())


class _Uploads:
    """Uploads in the background; the local files together stay below twice the largest one."""

    def __init__(
        self,
        threads: ThreadGroup,
        local: OutputFiles,
        directory: RemotePath,
        *,
        verify: bool,
        on_arrival: OnArrival,
    ) -> None:
        self._threads = threads
        self._local = local
        self._directory = directory
        self._verify = verify
        self._on_arrival = on_arrival
        self._room = 0
        self._pending: dict[str, int] = {}
        self._stop = threading.Event()

    def __enter__(self) -> _Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the uploads after an error instead of completing them."""
        if kind is not None:
            self._stop.set()

    def reserve(self, files: Collection[OutputFile]) -> None:
        """Check that the local disk has room for two files of the largest size.

        Raises:
            ResourceError: there is less room.
        """
        self._room = 2 * max((file.nbytes for file in files), default=0)
        free = shutil.disk_usage(self._local.directory).free
        if free < self._room:
            raise ResourceError(
                self._local.directory,
                f"{self._room:,} bytes are needed for two output files, but only {free:,} are free",
                "free some space, set TMPDIR to a larger disk, or choose smaller output files",
            )

    def make_room(self, file: OutputFile) -> None:
        """Wait until one more file fits on the local disk."""
        while self._pending and sum(self._pending.values()) + file.nbytes > self._room:
            self._wait()

    def send(self, file: OutputFile, seen: Outcome) -> None:
        """Upload a finished file in the background."""
        while len(self._pending) >= _FILES_AT_ONCE:
            self._wait()
        self._pending[file.name] = file.nbytes
        self._threads.start(partial(self._send, file, seen), name=file.name)

    def finish(self) -> None:
        """Wait for all uploads."""
        while self._pending:
            self._wait()

    def _send(self, file: OutputFile, seen: Outcome) -> None:
        self._local.forget(file.name)
        local_path, remote_path = self._local.directory / file.name, self._directory / file.name
        upload(local_path, remote_path, self._stop)
        if self._verify:
            check_read_back(local_path, remote_path, self._stop)
        self._on_arrival(file, seen)
        local_path.unlink()

    def _wait(self) -> None:
        del self._pending[self._threads.wait()]
