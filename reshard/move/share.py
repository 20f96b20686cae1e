"""Which windows of a plan fall to which rank, and what all ranks saw of theirs."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from reshard.move.outcome import Outcome
from reshard.plan.copies import Window
from reshard.ranks.team import Team, check_ranks_agree

_HELD = 1024  # batches, of which files are to be found
Batch = tuple[Window, ...]


class Share:
    """The windows of one rank: a run of the plan's bytes, as long as every other's.

    Args:
        nbytes: to be written by all ranks together.
    """

    def __init__(self, team: Team, nbytes: int) -> None:
        self._team = team
        self._nbytes = max(nbytes, 1)
        self._digest = hashlib.sha256()

    def files(self, sizes: Mapping[str, int]) -> set[str]:
        """The output files that are this rank's, where one is made by one rank."""
        found, at = set(), 0
        for file, nbytes in sizes.items():
            if self._is_mine(at + nbytes // 2):
                found.add(file)
            at += nbytes
        return found

    def of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Those that are this rank's; all of them are gone through, to `check`."""
        if self._team.size == 1:
            yield from batches
            return
        at = 0
        for batch in batches:
            self._note(batch)
            if self._is_mine(at):
                yield batch
            at += sum(window.nbytes for window in batch)

    def check(self) -> None:
        """Every rank must have gone through the same plan.

        Raises:
            DifferentError: one has not.
        """
        check_ranks_agree(self._team, "the plan", self._digest.hexdigest())

    def _is_mine(self, at: int) -> bool:
        owner = min(at * self._team.size // self._nbytes, self._team.size - 1)
        return owner == self._team.rank

    def _note(self, batch: Batch) -> None:
        for window in batch:
            copies = [
                (c.file, c.byte_offset, c.shape, c.byte_strides, c.target_offset)
                for c in window.copies
            ]
            self._digest.update(repr((window.file, window.byte_offset, copies)).encode())


def pooled(team: Team, seen: Outcome) -> Outcome:
    """What all ranks saw."""
    if team.size == 1:
        return seen
    whole = Outcome()
    for document in team.all_gather(json.dumps(seen.to_json()).encode()):
        whole.add(Outcome.from_json(json.loads(document)))
    return whole


def in_turns(batches: Iterable[Batch], workers: int) -> Iterator[Batch]:
    """Batches of as many output files in turn as there are workers.

    A file system lets one thread at a time write to a file.
    """
    waiting: dict[str, deque[Batch]] = {}
    held, more = 0, iter(batches)
    while True:
        while len(waiting) < workers and held < _HELD and (batch := next(more, None)) is not None:
            waiting.setdefault(batch[0].file, deque()).append(batch)
            held += 1
        if not waiting:
            return
        file = next(iter(waiting))
        lane = waiting.pop(file)
        yield lane.popleft()
        held -= 1
        if lane:
            waiting[file] = lane
