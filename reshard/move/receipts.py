"""Which files of an unfinished output an object store has, so that another run need not send them.

A receipt is an object beside the files: what its store said of one when it had been sent and read
back, and what was seen when it was made. It counts as long as the store says the same of that file.
Receipts lie below the digest of their job, and so do the files: what a process of another job
sends late, that was taken for dead, comes to lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from reshard.manifest import OutputFile, SourceFile
from reshard.move import job as jobs
from reshard.move.job import Job
from reshard.move.outcome import Outcome
from reshard.move.share import pooled
from reshard.move.spans import Spans
from reshard.ranks.team import ALONE, Team
from reshard.remote import writing
from reshard.remote.partial import RemotePartial
from reshard.remote.path import RemotePath
from reshard.remote.store import version_of

WORTH = 1 << 20
"""Bytes of a file; a smaller one is sent again as soon as it is looked for."""

_JOB = "job-"
_REQUESTS_AT_ONCE = 16


class Receipts:
    """Those of one process.

    Args:
        place: claimed.
        sources: reads of those that have checksums of their own are kept too, to be compared.
        verified: whether files are read back before.
    """

    def __init__(
        self, place: RemotePartial, job: Job, sources: Mapping[str, SourceFile], *, verified: bool
    ) -> None:
        self._place = place
        self._job = job
        self._checked = {path for path, file in sources.items() if file.has_checksums}
        self._verified = verified
        self._begun = False

    def keep(self, file: OutputFile, seen: Outcome) -> None:
        """A file is there; safe for threads.

        Raises:
            ReshardError: the store cannot be written to.
        """
        if file.nbytes < WORTH:
            return
        if not self._begun:
            (self._place.path / f"{_JOB}{jobs.digest(self._job)}").write_bytes(jobs.line(self._job))
            self._begun = True
        sent = self._place.output / file.name
        said = sent.store.info(str(sent))
        whole = Spans([(file.name, 0, file.nbytes, None)])
        document = {
            "version": version_of(said) if said else (),
            "verified": self._verified,
            "seen": replace(seen, windows=whole).to_json(self._checked),
        }
        (_folder(self._place, self._job) / file.name).write_bytes(jobs.line(document))
        self._place.kept_bytes += file.nbytes


def begin(place: RemotePartial, job: Job) -> None:
    """Have the output of this job grow in a place of its own."""
    place.output = place.path / f"output-{jobs.digest(job)}"


def left(place: RemotePartial, job: Job) -> Outcome | None:
    """What receipts of earlier runs say is there; None where there are none.

    Raises:
        UsageError: they are of another job; the message says what is different.
    """
    place.path.store.forget()
    begun = {path.name: path for path in place.path.glob(f"{_JOB}*")}
    mine = f"{_JOB}{jobs.digest(job)}"
    for path in begun.values() if mine not in begun else ():
        for line in jobs.whole(path.read_bytes().splitlines(keepends=True)):
            jobs.check_same(place.destination, jobs.document(line), job)
    seen = Outcome()
    for receipt in _receipts(place, job):
        seen.add(receipt.seen)
    place.kept_bytes = seen.nbytes
    return seen if mine in begun else None


def intact(place: RemotePartial, job: Job, *, verify: bool, team: Team = ALONE) -> Outcome:
    """The same without files of which the store says something else now, or nothing.

    Args:
        verify: those that were not read back count for nothing.
        team: the first rank asks, and tells the others.
    """
    seen = Outcome()
    for receipt in _receipts(place, job) if team.first else ():
        if receipt.is_good and (receipt.verified or not verify):
            seen.add(receipt.seen)
    return pooled(team, seen)


@dataclass(frozen=True, slots=True)
class _Receipt:
    seen: Outcome
    verified: bool
    is_good: bool


def _receipts(place: RemotePartial, job: Job) -> list[_Receipt]:
    folder = _folder(place, job)
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        found = threads.map(lambda name: _read(place, folder / name), writing.sizes_below(folder))
        return [receipt for receipt in found if receipt is not None]


def _read(place: RemotePartial, path: RemotePath) -> _Receipt | None:
    """What a receipt says, and whether its file's version is the one that it was given for."""
    for line in jobs.whole([path.read_bytes()]):
        said = jobs.document(line)
        seen = Outcome.from_json(said["seen"])
        (name,) = seen.windows.files
        info = path.store.info(str(place.output / name))
        version = version_of(info) if info else ()
        return _Receipt(seen, said["verified"], bool(version) and list(version) == said["version"])
    return None


def _folder(place: RemotePartial, job: Job) -> RemotePath:
    return place.path / f"sent-{jobs.digest(job)}"
