"""Extents: the contents of the output files of a skeleton, listed one file at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from reshard.box import Box
from reshard.chunks import Chunks
from reshard.dtypes import DType
from reshard.manifest import Skeleton


class Extent(NamedTuple):
    """A part of a tensor that occupies one contiguous range of an output file.

    Args:
        entry: the index of the tensor's entry in the skeleton.
        byte_offset: the offset of the range in the file.
        start: the first element of the smallest flat run that contains the part.
        stop: the end of that run, exclusive.
        box: the part itself, or None if the part is the whole run.
        dtype: the dtype in the output file.
    """

    entry: int
    byte_offset: int
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

    Every chunk must be contiguous. Extents are built file by file: memory holds those of one file.
    """
    index = FileIndex(skeleton)
    for file in index.files():
        yield file, sorted(index.extents(file), key=lambda extent: extent.byte_offset)
        index.drop(file)


class FileIndex:
    """An index from file name to the parts of tensors that are stored in that file."""

    def __init__(self, skeleton: Skeleton) -> None:
        # Tensors with the same files are listed once: file -> (table of files, position in it),
        # and table -> (number of the entry, its chunks).
        self._positions: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._entries: dict[int, list[tuple[int, Chunks]]] = defaultdict(list)
        for number, entry in enumerate(skeleton.entries):
            table, files = entry.layout.file_table
            if table not in self._entries:
                for position, file in enumerate(files):
                    self._positions[file].append((table, position))
            self._entries[table].append((number, entry.layout))

    def files(self) -> list[str]:
        """Return the names of all files that contain tensor bytes, sorted."""
        return sorted(self._positions)

    def extents(self, file: str) -> Iterator[Extent]:
        """Yield the extents of `file`, in any order."""
        for table, position in self._positions.get(file, ()):
            for number, chunks in self._entries[table]:
                part = chunks.part(position)
                if part is not None:
                    yield Extent(number, *part)

    def drop(self, file: str) -> None:
        """Remove a file from the index, to free memory."""
        self._positions.pop(file, None)
