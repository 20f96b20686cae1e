"""What an execution saw: added up over workers, kept in a journal, told to other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.move.spans import FileSpan, Span, Spans


@dataclass(slots=True)
class Outcome:
    """What an execution saw; each worker keeps its own, and they are added up."""

    windows: Spans = field(default_factory=Spans)  # CRCs where the file stores checksums
    nbytes: int = 0  # of the windows
    reads: Spans = field(default_factory=Spans)  # of files that have stored checksums
    overflowed: Counter[str] = field(default_factory=Counter)  # fqn -> finite values made infinite
    flushed: Counter[str] = field(default_factory=Counter)  # fqn -> values made zero

    def add(self, other: Outcome) -> None:
        """Take over what another worker saw."""
        self.windows.update(other.windows)
        self.nbytes += other.nbytes
        self.reads.update(other.reads)
        self.overflowed += other.overflowed
        self.flushed += other.flushed

    def to_json(self) -> dict[str, Any]:
        """A document of it."""
        return {
            "windows": _by_file(self.windows),
            "reads": _by_file(self.reads),
            "overflowed": self.overflowed,
            "flushed": self.flushed,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Outcome:
        """What `to_json` made a document of."""
        windows = Spans(_told(document["windows"]))
        return cls(
            windows,
            windows.nbytes,
            Spans(_told(document["reads"])),
            Counter(document["overflowed"]),
            Counter(document["flushed"]),
        )


def _by_file(spans: Iterable[FileSpan]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for file, offset, nbytes, crc in spans:
        found[file].append((offset, nbytes, crc))
    return found


def _told(found: Mapping[str, Iterable[Span]]) -> Iterator[FileSpan]:
    return ((file, *span) for file, spans in found.items() for span in spans)


Keep = Callable[[Outcome], Outcome]
"""Shown what a worker saw so far; takes it, and gives a new one, when that is to be journaled."""


def unkept(seen: Outcome) -> Outcome:
    """Of a run that leaves no journal."""
    return seen
