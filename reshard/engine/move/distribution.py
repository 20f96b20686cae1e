"""Distribution of a plan over ranks: which rank fills which windows, and the merged outcome."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from reshard.engine.move.outcome import Outcome
from reshard.engine.planning.copies import Window
from reshard.system.ranks.team import Team, check_ranks_agree

_LOOKAHEAD = 1024  # batches to look through for other files
Batch = tuple[Window, ...]


class Share:
    """The share of one rank: a contiguous range of the plan's bytes, of equal size for all ranks.

    Args:
        team: this rank and the number of ranks.
        nbytes: the number of bytes that all ranks write together.
    """

    def __init__(self, team: Team, nbytes: int) -> None:
        self._team = team
        self._nbytes = max(nbytes, 1)
        self._digest = hashlib.sha256()

    def select_files(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the output files of this rank, where one rank writes a whole file."""
        files, at = set(), 0
        for file, nbytes in sizes.items():
            if self._is_mine(at + nbytes // 2):  # the middle of a file decides
                files.add(file)
            at += nbytes
        return files

    def select_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of this rank; all batches enter the digest that `check` compares."""
        if self._team.size == 1:
            yield from batches
            return
        at = 0
        for batch in batches:
            self._add_to_digest(batch)
            if self._is_mine(at):
                yield batch
            at += sum(window.nbytes for window in batch)

    def check(self) -> None:
        """Check that every rank has processed the same plan.

        Raises:
            DifferentError: the plans differ.
        """
        check_ranks_agree(self._team, "the plan", self._digest.hexdigest())

    def _is_mine(self, at: int) -> bool:
        # A window that an earlier run has filled in part is filled
        # again, so `at` can reach `nbytes`.
        owner = min(at * self._team.size // self._nbytes, self._team.size - 1)
        return owner == self._team.rank

    def _add_to_digest(self, batch: Batch) -> None:
        for window in batch:
            copies = [
                (c.file, c.byte_offset, c.shape, c.byte_strides, c.target_offset)
                for c in window.copies
            ]
            self._digest.update(repr((window.file, window.byte_offset, copies)).encode())


def merge_across_ranks(team: Team, seen: Outcome) -> Outcome:
    """Return the sum of the outcomes of all ranks, on every rank."""
    if team.size == 1:
        return seen
    whole = Outcome()
    for document in team.all_gather(json.dumps(seen.to_json()).encode()):
        whole.add(Outcome.from_json(json.loads(document)))
    return whole


def interleave_files(batches: Iterable[Batch], workers: int) -> Iterator[Batch]:
    """Yield the batches so that consecutive ones belong to different files, one for each worker.

    File systems serialize writes to one file, so the workers should write to different files.
    """
    waiting: dict[str, deque[Batch]] = {}
    queued, more = 0, iter(batches)
    while True:
        while len(waiting) < workers and queued < _LOOKAHEAD:
            batch = next(more, None)
            if batch is None:
                break
            waiting.setdefault(batch[0].file, deque()).append(batch)
            queued += 1
        if not waiting:
            return
        # A dict keeps the order of insertion: the file that has waited longest comes first.
        file = next(iter(waiting))
        lane = waiting.pop(file)
        yield lane.popleft()
        queued -= 1
        if lane:
            waiting[file] = lane
