"""Which files of an unfinished output an object store has, so that another run need not send them.

A receipt is an object beside the files: what its store said of one when it had been sent and read
back, and what was seen when it was made. It counts as long as the store says the same of that file.
Receipts lie below the digest of their job, and so do the files: what a process of another job
sends late, that was taken for dead, comes to lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reshard import threads
from reshard.manifest import OutputFile, SourceFile
from reshard.move import job as jobs
from reshard.move import upload
from reshard.move.job import Job
from reshard.move.options import MoveOptions
from reshard.move.outcome import Outcome
from reshard.move.share import pooled
from reshard.move.spans import Spans
from reshard.plan.planner import Plan
from reshard.remote import writing
from reshard.remote.partial import JOB, OUTPUT, SENT, RemotePartial
from reshard.remote.store import version_of

WORTH = 1 << 20
"""Bytes of a file; a smaller one is sent again as soon as it is looked for."""

_REQUESTS_AT_ONCE = 16


class Receipts:
    """Those of a job; an `unfinished.Unfinished`.

    Args:
        place: claimed, or joined; the job's output grows in a folder of its own there.
        job: see `job.describe`.
    """

    def __init__(
        self,
        place: RemotePartial,
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
        digest = jobs.digest(job)
        place.output = place.path / f"{OUTPUT}-{digest}"
        self._folder = place.path / f"{SENT}-{digest}"
        self._begun_as = place.path / f"{JOB}-{digest}"
        self._begun = False
        self._found: list[_Receipt] = []  # by the first rank, for all

    def left(self) -> Outcome | None:
        """What receipts of earlier runs say is there; None where there are none.

        Raises:
            UsageError: they are of another job; the message says what is different.
        """
        place = self._place
        place.path.store.forget()
        begun = list(place.path.glob(f"{JOB}-*"))
        mine = self._begun_as in begun
        for path in () if mine else begun:
            for line in jobs.whole(path.read_bytes().splitlines(keepends=True)):
                jobs.check_same_job(place.destination, jobs.document(line), self._job)
        self._found = self._receipts()
        seen = Outcome()
        for receipt in self._found:
            seen.add(receipt.seen)
        place.kept_bytes = seen.nbytes
        return seen if mine else None

    def intact(self, left: Outcome) -> Outcome:  # noqa: ARG002 - the receipts of `left` say it
        """The same without files of which the store says something else now, or nothing.

        To verify is to count those for nothing that were not read back.
        """
        verify, team = self._options.verify, self._options.team
        seen = Outcome()
        good = threads.parallel_map(self._found, self._holds, _REQUESTS_AT_ONCE)
        for receipt, is_good in zip(self._found, good, strict=True):
            if is_good and (receipt.verified or not verify):
                seen.add(receipt.seen)
        return pooled(team, seen)

    def finish(self, done: Outcome | None) -> Outcome:
        """Send the files that are not there, each with its receipt.

        Raises:
            ReshardError: as `upload.write`, or a receipt cannot be written.
        """
        output, options = self._place.output, self._options
        return upload.write(
            self._plan, self._sources, output, options, done=done, arrived=self.keep
        )

    def keep(self, file: OutputFile, seen: Outcome) -> None:
        """A file is there; safe for threads.

        Raises:
            ReshardError: the store cannot be written to.
        """
        if file.nbytes < WORTH:
            return
        if not self._begun:
            self._begun_as.write_bytes(jobs.line(self._job))
            self._begun = True
        sent = self._place.output / file.name
        said = sent.store.info(str(sent))
        whole = Spans([(file.name, 0, file.nbytes, None)])
        document = {
            "version": version_of(said) if said else (),
            "verified": self._options.verify,
            "seen": replace(seen, windows=whole).to_json(),
        }
        (self._folder / file.name).write_bytes(jobs.line(document))
        self._place.kept_bytes += file.nbytes

    def _receipts(self) -> list[_Receipt]:
        """Those of earlier runs."""
        names = writing.sizes_below(self._folder)
        found = threads.parallel_map(names, self._read, _REQUESTS_AT_ONCE)
        return [receipt for receipt in found if receipt is not None]

    def _read(self, name: str) -> _Receipt | None:
        """What a whole receipt says."""
        for line in jobs.whole([(self._folder / name).read_bytes()]):
            said = jobs.document(line)
            seen = Outcome.from_json(said["seen"])
            (file,) = seen.windows.files
            return _Receipt(file, seen, said["verified"], said["version"])
        return None

    def _holds(self, receipt: _Receipt) -> bool:
        """Whether the store's file is the one that the receipt was given for."""
        output = self._place.output
        info = output.store.info(str(output / receipt.file))
        version = version_of(info) if info else ()
        return bool(version) and list(version) == receipt.version


@dataclass(frozen=True, slots=True)
class _Receipt:
    file: str
    seen: Outcome
    verified: bool
    version: Sequence[object]
