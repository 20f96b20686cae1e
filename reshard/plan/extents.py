"""What lies in the output files of a skeleton, one file at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from reshard.box import Box, flat_span
from reshard.dtypes import DType
from reshard.layout.runs import Runs
from reshard.manifest import Chunk, Skeleton


class Extent(NamedTuple):
    """A part of a tensor that is one contiguous range of an output file.

    Args:
        entry: its number in the skeleton.
        start, stop: the smallest run of the flattened tensor that holds the part.
        box: the part, where it is not that run as a whole.
    """

    byte_offset: int
    entry: int
    start: int
    stop: int
    box: Box | None
    dtype: DType

    @property
    def is_run(self) -> bool:
        """Whether it holds every element of that run."""
        return self.numel == self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start if self.box is None else self.box.volume

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.numel * self.dtype.itemsize


def by_file(skeleton: Skeleton) -> Iterator[tuple[str, list[Extent]]]:
    """The files in the order of their names, each with its extents in the order of their offsets.

    Every chunk must lie contiguously. Equal runs (`runs.Runs`) are made into extents as their file
    comes, so that no more than one file's are held.
    """
    index = _Index(skeleton)
    for file in index.files():
        yield file, sorted(index.extents(file), key=lambda extent: extent.byte_offset)


class _Index:
    """Which entries are in a file."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._entries = skeleton.entries
        self._chunks: dict[str, list[tuple[int, Chunk]]] = defaultdict(list)
        self._ranks: dict[str, list[tuple[int, int]]] = defaultdict(list)  # whose places, rank
        self._runs: dict[int, list[tuple[int, Runs]]] = defaultdict(list)  # by their places' id
        for number, entry in enumerate(skeleton.entries):
            if isinstance(entry.chunks, Runs):
                self._add_runs(number, entry.chunks)
                continue
            for chunk in entry.chunks:
                if chunk.box.volume:
                    self._chunks[chunk.file].append((number, chunk))

    def _add_runs(self, number: int, runs: Runs) -> None:
        whose = id(runs.places)
        if whose not in self._runs:
            for rank, file in enumerate(runs.places.files):
                self._ranks[file].append((whose, rank))
        self._runs[whose].append((number, runs))

    def files(self) -> list[str]:
        """All that hold a tensor, in the order of their names."""
        return sorted(self._chunks.keys() | self._ranks.keys())

    def extents(self, file: str) -> Iterator[Extent]:
        """Those of a file, which is forgotten then."""
        for number, chunk in self._chunks.pop(file, ()):
            start, stop = flat_span(chunk.box, self._entries[number].shape)
            yield Extent(chunk.byte_offset, number, start, stop, chunk.box, chunk.dtype)
        for whose, rank in self._ranks.pop(file, ()):
            for number, held in self._runs[whose]:
                start, stop = held.run(rank)
                if start < stop:
                    at = held.byte_offset(rank)
                    yield Extent(at, number, start, stop, None, held.dtype)
