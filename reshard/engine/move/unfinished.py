"""Outputs that a later run can resume: on a disk with a journal, or in a store with receipts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from reshard.core.manifest import SourceFile
from reshard.engine.move.job import Job
from reshard.engine.move.options import MoveOptions
from reshard.engine.move.outcome import Outcome
from reshard.engine.output.commit import PartialOutput
from reshard.engine.planning.planner import Plan

P = TypeVar("P", bound="PartialOutput")


class Unfinished(ABC, Generic[P]):
    """An output in progress, which records what is done so that a later run can resume it.

    Args:
        partial: the partial output, which this process has claimed or joined.
        job: see `job.describe`.
        plan: the windows to fill.
        sources: the source files by path.
        options: threads, verification, and the team that shares the work.
    """

    def __init__(
        self,
        partial: P,
        job: Job,
        plan: Plan,
        sources: Mapping[str, SourceFile],
        options: MoveOptions,
    ) -> None:
        self._partial = partial
        self._job = job
        self._plan = plan
        self._sources = sources
        self._options = options

    @abstractmethod
    def read_progress(self) -> Outcome | None:
        """Return what earlier runs recorded as done, or None if they recorded nothing.

        Raises:
            UsageError: the records belong to another job; the message says what differs.
        """

    @abstractmethod
    def check_progress(self, left: Outcome) -> Outcome:
        """Return the part of `left` whose bytes are still as they were written.

        All ranks must call this method together.

        Args:
            left: what `read_progress` returned on the first rank; the other ranks receive it here.
        """

    @abstractmethod
    def finish(self, done: Outcome | None) -> Outcome:
        """Write what is missing, record the progress, and return the outcome of all ranks and runs.

        Args:
            done: the outcome of the parts that exist already, or None to start with nothing.

        Raises:
            ReshardError: as in `execute.execute`, or a file cannot be uploaded, or the progress
                cannot be recorded.
        """
