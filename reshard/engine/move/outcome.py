"""Outcomes: what an execution did and found, added up over workers, runs and ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.engine.move.spans import FileSpan, Span, Spans


@dataclass(slots=True)
class Outcome:
    """What an execution did and found; each worker has its own, and they are added up."""

    windows: Spans = field(default_factory=Spans)  # written; with CRCs if the file stores checksums
    nbytes: int = 0  # size of the windows
    reads: Spans = field(default_factory=Spans)  # read from files that have stored checksums
    overflowed: Counter[str] = field(default_factory=Counter)  # fqn -> finite values made infinite
    flushed: Counter[str] = field(default_factory=Counter)  # fqn -> values made zero

    def add(self, other: Outcome) -> None:
        """Add the outcome of another worker, run or rank to this one."""
        self.windows.update(other.windows)
        self.nbytes += other.nbytes
        self.reads.update(other.reads)
        self.overflowed += other.overflowed
        self.flushed += other.flushed

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as a JSON document."""
        return {
            "windows": _group_by_file(self.windows),
            "reads": _group_by_file(self.reads),
            "overflowed": self.overflowed,
            "flushed": self.flushed,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Outcome:
        """Return the outcome that `to_json` has turned into a document."""
        windows = Spans(_parse_spans(document["windows"]))
        return cls(
            windows,
            windows.nbytes,
            Spans(_parse_spans(document["reads"])),
            Counter(document["overflowed"]),
            Counter(document["flushed"]),
        )


def _group_by_file(spans: Iterable[FileSpan]) -> dict[str, list[Span]]:
    by_file: dict[str, list[Span]] = defaultdict(list)
    for file, offset, nbytes, crc in spans:
        by_file[file].append((offset, nbytes, crc))
    return by_file


def _parse_spans(by_file: Mapping[str, Iterable[Span]]) -> Iterator[FileSpan]:
    return ((file, *span) for file, spans in by_file.items() for span in spans)


Keep = Callable[[Outcome], Outcome]
"""Called with a worker's outcome after each batch; returns the outcome to continue with.

It returns the same object, or stores that one in the journal and returns an empty outcome.
"""


def keep_in_memory(seen: Outcome) -> Outcome:
    """Return `seen`: the `Keep` of a run without a journal."""
    return seen
