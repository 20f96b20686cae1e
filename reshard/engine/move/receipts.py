"""Receipts: which files of an unfinished output are in an object store, so that a run can resume.

A receipt is an object beside the files. It stores the file's version as reported after the
upload, and the outcome of building the file. It is valid while the store reports that version.

Receipts and files are stored below the digest of their job: a process of another job that was
considered dead but uploads late writes elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from reshard.core.manifest import OutputFile
from reshard.engine.move import job as jobs
from reshard.engine.move.distribution import Batch, Share, merge_across_ranks
from reshard.engine.move.execute import OutputBuilder, check_records, list_lasting
from reshard.engine.move.outcome import Outcome
from reshard.engine.move.spans import Spans
from reshard.engine.move.unfinished import Unfinished
from reshard.engine.output.files import OutputFiles
from reshard.engine.output.remote import JOB, OUTPUT, SENT, RemotePartial
from reshard.engine.output.temporary import temporary
from reshard.engine.output.uploads import Uploads
from reshard.engine.planning.planner import Plan
from reshard.system import threads
from reshard.system.files import SourceFiles
from reshard.system.ranks.team import select_share
from reshard.system.remote import objects
from reshard.system.remote.store import get_version

MIN_BYTES = 1 << 20
"""Size in bytes from which a file gets a receipt; uploading a smaller one again is as fast."""

_REQUESTS_AT_ONCE = 16


class Receipts(Unfinished[RemotePartial]):
    """The receipts of a job, whose output is in its own folder."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        partial, digest = self._partial, jobs.compute_digest(self._job)
        partial.output = partial.path / f"{OUTPUT}-{digest}"
        self._folder = partial.path / f"{SENT}-{digest}"
        self._job_path = partial.path / f"{JOB}-{digest}"
        self._is_job_written = False
        self._receipts: list[_Receipt] = []  # read by the first rank only

    def read_progress(self) -> Outcome | None:
        """Return what the receipts of earlier runs record, or None if this job has not run before.

        Raises:
            UsageError: the receipts belong to another job; the message says what differs.
        """
        partial = self._partial
        # Other processes may have written since the folder was listed.
        partial.path.store.forget()
        recorded = list(partial.path.glob(f"{JOB}-*"))
        has_run = self._job_path in recorded
        # The record of another job is an error only if this job itself has left nothing to resume.
        for path in (self._job_path,) if has_run else recorded:
            for line in jobs.iterate_valid_lines(path.read_bytes().splitlines(keepends=True)):
                jobs.check_same_job(partial.destination, jobs.parse_line(line), self._job)
        self._receipts = self._read_all()
        seen = Outcome()
        for receipt in self._receipts:
            seen.add(receipt.seen)
        partial.resumable_bytes = seen.nbytes
        return seen if has_run else None

    def check_progress(self, left: Outcome) -> Outcome:  # noqa: ARG002 - the receipts record it
        """Return the outcome of the files that the store still has in the recorded version.

        With `verify`, files that were not read back after their upload do not count.
        """
        verify, team = self._options.verify, self._options.team
        seen = Outcome()
        valid = threads.parallel_map(self._receipts, self._is_valid, _REQUESTS_AT_ONCE)
        for receipt, is_valid in zip(self._receipts, valid, strict=True):
            if is_valid and (receipt.verified or not verify):
                seen.add(receipt.seen)
        return merge_across_ranks(team, seen)

    def finish(self, done: Outcome | None) -> Outcome:
        """Build the missing files on the local disk and upload them, each with its receipt.

        Some formats store checksums in front of the bytes that they describe, so a file must be
        complete before its first byte can be sent. One file is uploaded while the next one is
        filled. Each rank writes whole files.

        Raises:
            ReshardError: a file cannot be uploaded, or as in `execute.execute`.
        """
        before, options = done or Outcome(), self._options
        with (
            SourceFiles(self._sources) as pool,
            temporary() as here,
            OutputFiles(Path(here)) as local,
            Uploads(local, self._partial.output, verify=options.verify) as uploads,
        ):
            builder = OutputBuilder(pool, local, self._sources, self._plan.target, options)
            seen = self._build_files(builder, uploads, before)
            outcome = merge_across_ranks(options.team, seen)
            outcome.add(before)
            check_records(outcome.reads, self._sources, pool, options)
            pool.check_unread(select_share(options.team, list_lasting(self._sources)))
        options.team.barrier()
        self._partial.path.store.forget()  # listings from before the other ranks uploaded
        return outcome

    def _build_files(self, builder: OutputBuilder, uploads: Uploads, before: Outcome) -> Outcome:
        target, seen = self._plan.target, Outcome()
        stored = set(before.windows.files)
        missing = {file.name: file for file in target.files if file.name not in stored}
        sizes = {name: file.nbytes for name, file in missing.items()}
        mine = Share(self._options.team, sum(sizes.values())).select_files(sizes)
        files = {name: file for name, file in missing.items() if name in mine}
        uploads.reserve(files.values())
        # Interleaved tensors would fill all of their files at once,
        # but only two fit on the local disk.
        for file, batches in _iterate_files(self._plan.without_interleaving(), files):
            uploads.make_room(file)
            builder.create([file])
            part = builder.fill(batches)
            builder.finish([file], part)
            uploads.send(file, partial(self.keep, file, part))
            # The windows were needed for the file's own checksums only.
            seen.add(replace(part, windows=Spans()))
        uploads.finish()
        return seen

    def keep(self, file: OutputFile, seen: Outcome) -> None:
        """Write the receipt of an uploaded file; several threads may call this method at once.

        Raises:
            ReshardError: the store cannot be written to.
        """
        if file.nbytes < MIN_BYTES:
            return
        # Two threads may both write it, with the same content.
        if not self._is_job_written:
            self._job_path.write_bytes(jobs.format_line(self._job))
            self._is_job_written = True
        path = self._partial.output / file.name
        info = path.store.info(str(path))
        whole_file = Spans([(file.name, 0, file.nbytes, None)])
        document = {
            "version": get_version(info) if info else (),
            "verified": self._options.verify,
            "seen": replace(seen, windows=whole_file).to_json(),
        }
        (self._folder / file.name).write_bytes(jobs.format_line(document))
        self._partial.resumable_bytes += file.nbytes

    def _read_all(self) -> list[_Receipt]:
        names = objects.list_sizes(self._folder)
        receipts = threads.parallel_map(names, self._read, _REQUESTS_AT_ONCE)
        return [receipt for receipt in receipts if receipt is not None]

    def _read(self, name: str) -> _Receipt | None:
        for line in jobs.iterate_valid_lines([(self._folder / name).read_bytes()]):
            document = jobs.parse_line(line)
            seen = Outcome.from_json(document["seen"])
            (file,) = seen.windows.files
            return _Receipt(file, seen, document["verified"], document["version"])
        return None

    def _is_valid(self, receipt: _Receipt) -> bool:
        output = self._partial.output
        info = output.store.info(str(output / receipt.file))
        version = get_version(info) if info else ()
        # A tuple comes back from JSON as a list.
        return bool(version) and list(version) == receipt.version


def _iterate_files(
    plan: Plan, files: Mapping[str, OutputFile]
) -> Iterator[tuple[OutputFile, Iterator[Batch]]]:
    bare = dict(files)
    for name, group in groupby(plan.batches(), key=lambda batch: batch[0].file):
        if name in files:
            yield bare.pop(name), group
    yield from ((file, iter(())) for file in bare.values())


@dataclass(frozen=True, slots=True)
class _Receipt:
    file: str
    seen: Outcome
    verified: bool
    version: Sequence[object]
