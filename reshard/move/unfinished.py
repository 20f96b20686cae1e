"""An output that grows in its place: what earlier runs have done of it for good, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from reshard.manifest import SourceFile
from reshard.move.job import Job
from reshard.move.journal import Journal
from reshard.move.options import MoveOptions
from reshard.move.outcome import Outcome
from reshard.output.commit import Place
from reshard.output.partial import Partial
from reshard.plan.planner import Plan

if TYPE_CHECKING:
    from reshard.remote.partial import RemotePartial


class Unfinished(Protocol):
    """On a disk, with a journal; or in an object store, with receipts."""

    def left(self) -> Outcome | None:
        """What earlier runs noted as done; None where they noted nothing.

        Raises:
            UsageError: it is of another job; the message says what is different.
        """

    def intact(self, left: Outcome) -> Outcome:
        """The same without what is not as it was written; for all ranks to ask together.

        Args:
            left: as the first rank found it, which tells the others.
        """

    def finish(self, done: Outcome | None) -> Outcome:
        """Make the rest, and note what is done; the outcome is of all ranks and runs.

        Args:
            done: what is there of it; None where the place is empty.

        Raises:
            ReshardError: as `execute.execute` and `upload.write`.
        """


def unfinished(
    place: Place,
    job: Job,
    plan: Plan,
    sources: Mapping[str, SourceFile],
    options: MoveOptions,
) -> Unfinished:
    """The output of a job in its place, which this process has claimed or joined."""
    if isinstance(place, Partial):
        return Journal(place, job, plan, sources, options)
    from reshard.move.receipts import Receipts

    return Receipts(cast("RemotePartial", place), job, plan, sources, options)
