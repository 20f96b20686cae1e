"""What an execution saw: added up over workers, kept in a journal, told to other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.move.fill import ReadSpan

Windows = dict[tuple[str, int], tuple[int, int | None]]
"""(file, byte offset) -> nbytes, and the CRC-32 where the file stores checksums."""


@dataclass(slots=True)
class Outcome:
    """What an execution saw; each worker keeps its own, and they are added up."""

    windows: Windows = field(default_factory=dict)
    nbytes: int = 0  # of the windows
    reads: list[ReadSpan] = field(default_factory=list)  # of files that have stored checksums
    overflowed: Counter[str] = field(default_factory=Counter)  # fqn -> finite values made infinite
    flushed: Counter[str] = field(default_factory=Counter)  # fqn -> values made zero

    def add(self, other: Outcome) -> None:
        """Take over what another worker saw."""
        self.windows |= other.windows
        self.nbytes += other.nbytes
        self.reads += other.reads
        self.overflowed += other.overflowed
        self.flushed += other.flushed

    def to_json(self, checked: Collection[str] | None = None) -> dict[str, Any]:
        """A document of it.

        Args:
            checked: of other sources, reads are left out.
        """
        windows: dict[str, list[tuple[int, int, int | None]]] = defaultdict(list)
        for (name, offset), (nbytes, crc) in self.windows.items():
            windows[name].append((offset, nbytes, crc))
        reads: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for name, offset, nbytes, crc in self.reads:
            if checked is None or name in checked:
                reads[name].append((offset, nbytes, crc))
        counts = {"overflowed": self.overflowed, "flushed": self.flushed}
        return {"windows": windows, "reads": reads, **counts}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Outcome:
        """What `to_json` made a document of."""
        windows: Windows = {
            (name, offset): (nbytes, crc)
            for name, held in document["windows"].items()
            for offset, nbytes, crc in held
        }
        return cls(
            windows,
            sum(nbytes for nbytes, _ in windows.values()),
            [(name, *read) for name, held in document["reads"].items() for read in held],
            Counter(document["overflowed"]),
            Counter(document["flushed"]),
        )


Keep = Callable[[Outcome], Outcome]
"""Shown what a worker saw so far; takes it, and gives a new one, when that is to be journaled."""


def unkept(seen: Outcome) -> Outcome:
    """Of a run that leaves no journal."""
    return seen
