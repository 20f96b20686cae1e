"""A common interface of outputs that can be resumed: `journal.Journal` and `receipts.Receipts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from reshard.manifest import SourceFile
from reshard.move.job import Job
from reshard.move.journal import Journal
from reshard.move.options import MoveOptions
from reshard.move.outcome import Outcome
from reshard.output.commit import PartialOutput
from reshard.output.partial import Partial
from reshard.plan.planner import Plan

if TYPE_CHECKING:
    from reshard.output.remote import RemotePartial


class Unfinished(Protocol):
    """An output in progress: on a disk with a journal, or in an object store with receipts."""

    def read_progress(self) -> Outcome | None:
        """Return what earlier runs recorded as done, or None if they recorded nothing.

        Raises:
            UsageError: the records belong to another job; the message says what differs.
        """

    def check_progress(self, left: Outcome) -> Outcome:
        """Return the part of `left` whose bytes are still as they were written.

        All ranks must call this method together.

        Args:
            left: what `read_progress` returned on the first rank; the other ranks receive it here.
        """

    def finish(self, done: Outcome | None) -> Outcome:
        """Write what is missing, record the progress, and return the outcome of all ranks and runs.

        Args:
            done: the outcome of the parts that exist already, or None to start with nothing.

        Raises:
            ReshardError: as in `execute.execute` and `upload.write`.
        """


def open_unfinished(
    partial: PartialOutput,
    job: Job,
    plan: Plan,
    sources: Mapping[str, SourceFile],
    options: MoveOptions,
) -> Unfinished:
    """Return the output of a job in `partial`, which this process has claimed or joined."""
    if isinstance(partial, Partial):
        return Journal(partial, job, plan, sources, options)
    from reshard.move.receipts import Receipts

    return Receipts(cast("RemotePartial", partial), job, plan, sources, options)
