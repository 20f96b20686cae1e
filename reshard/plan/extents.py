"""Extents: the contents of the output files of a skeleton, listed one file at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from reshard.box import Box, flat_span
from reshard.dtypes import DType
from reshard.layout.runs import EqualRuns
from reshard.manifest import Chunk, Skeleton


class Extent(NamedTuple):
    """A part of a tensor that occupies one contiguous range of an output file.

    Args:
        byte_offset: the offset of the range in the file.
        entry: the index of the tensor's entry in the skeleton.
        start: the first element of the smallest flat run that contains the part.
        stop: the end of that run, exclusive.
        box: the part itself, or None if the part is the whole run.
        dtype: the dtype in the output file.
    """

    byte_offset: int
    entry: int
    start: int
    stop: int
    box: Box | None
    dtype: DType

    @property
    def is_run(self) -> bool:
        """Whether the part contains every element of its run."""
        return self.numel == self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start if self.box is None else self.box.volume

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return self.numel * self.dtype.itemsize


def iterate_output_files(skeleton: Skeleton) -> Iterator[tuple[str, list[Extent]]]:
    """Yield the output files sorted by name, each with its extents sorted by offset.

    Every chunk must be contiguous. Equal runs (`EqualRuns`) are expanded into extents file by file,
    so that memory holds the extents of one file only.
    """
    index = _FileIndex(skeleton)
    for file in index.files():
        yield file, sorted(index.extents(file), key=lambda extent: extent.byte_offset)


class _FileIndex:
    """An index from file name to the chunks and runs stored in that file."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._entries = skeleton.entries
        self._chunks: dict[str, list[tuple[int, Chunk]]] = defaultdict(list)
        # Entries that share one `Places` object have the same files, so each file is listed once
        # per object: file -> (id of the object, rank), and id -> entries.
        self._ranks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._runs: dict[int, list[tuple[int, EqualRuns]]] = defaultdict(list)
        for number, entry in enumerate(skeleton.entries):
            if isinstance(entry.chunks, EqualRuns):
                self._add_runs(number, entry.chunks)
                continue
            for chunk in entry.chunks:
                if chunk.box.volume:
                    self._chunks[chunk.file].append((number, chunk))

    def _add_runs(self, number: int, runs: EqualRuns) -> None:
        layout = id(runs.offsets)
        if layout not in self._runs:
            for rank, file in enumerate(runs.offsets.files):
                self._ranks[file].append((layout, rank))
        self._runs[layout].append((number, runs))

    def files(self) -> list[str]:
        """Return the names of all files that contain tensor bytes, sorted."""
        return sorted(self._chunks.keys() | self._ranks.keys())

    def extents(self, file: str) -> Iterator[Extent]:
        """Yield the extents of `file` and drop it from the index."""
        for number, chunk in self._chunks.pop(file, ()):
            start, stop = flat_span(chunk.box, self._entries[number].shape)
            yield Extent(chunk.byte_offset, number, start, stop, chunk.box, chunk.dtype)
        for layout, rank in self._ranks.pop(file, ()):
            for number, runs in self._runs[layout]:
                start, stop = runs.run(rank)
                if start < stop:
                    at = runs.byte_offset(rank)
                    yield Extent(at, number, start, stop, None, runs.dtype)
