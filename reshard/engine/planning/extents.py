"""Extents: the contents of the output files of a skeleton, listed one file at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from reshard.core.box import Box
from reshard.core.chunks import Chunks, Regular
from reshard.core.dtypes import DType
from reshard.core.manifest import Skeleton


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


class Placement(NamedTuple):
    """The position of a file among files that hold parts of the same tensors.

    Args:
        key: equal for files whose extents differ only by a shift: in the file by the difference
            of their ``byte_offset``, in each tensor by the difference of their ``position`` steps.
        byte_offset: where the first of the file's flat tensors begins.
        position: the position in the tables of files.
        ranges: the bytes of the file in which each of its flat tensors lies.
    """

    key: Hashable
    byte_offset: int
    position: int
    ranges: list[tuple[int, int]]


class _FileTable:
    """The tensors that share one table of files, all of them regular."""

    def __init__(self, regular: Sequence[Regular]) -> None:
        self.byte_offsets = regular[0].byte_offsets
        # A tensor's parts change at two positions: the first that is not full, the first empty one.
        self.changes = sorted({at for tensor in regular for at in (tensor.full, tensor.filled)})
        runs = sorted((tensor.skipped, tensor.skipped + tensor.nbytes) for tensor in regular)
        self.is_disjoint = all(a[1] <= b[0] for a, b in pairwise(runs))
        self.first, self.stop = runs[0][0], max(stop for _, stop in runs)


class FileIndex:
    """An index from file name to the parts of tensors that are stored in that file."""

    def __init__(self, skeleton: Skeleton) -> None:
        # Tensors with the same files are listed once: file -> (table of files, position in it),
        # and table -> (number of the entry, its chunks).
        self._positions: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._entries: dict[int, list[tuple[int, Chunks]]] = defaultdict(list)
        self._tables: dict[int, _FileTable | None] = {}
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

    def sort_extents(self, file: str) -> list[Extent]:
        """Return the extents of `file`, sorted by offset."""
        return sorted(self.extents(file), key=lambda extent: extent.byte_offset)

    def find_placement(self, file: str) -> Placement | None:
        """Return the placement of a file, or None if a tensor in it is not regular.

        It is None, too, where two tensors of one table share bytes.
        """
        key, ranges = [], []
        positions = self._positions[file]
        for number, position in positions:
            table = self._table(number)
            # `WindowPart.step` moves all parts by the same number of positions.
            if table is None or not table.is_disjoint or position != positions[0][1]:
                return None
            begin = table.byte_offsets[position]
            # Files on the same side of every change have parts of the same sizes.
            key.append((number, bisect_right(table.changes, position), begin))
            ranges.append((begin + table.first, begin + table.stop))
        first = key[0][2]
        shape = tuple((number, state, begin - first) for number, state, begin in key)
        return Placement(shape, first, positions[0][1], ranges)

    def _table(self, number: int) -> _FileTable | None:
        if number not in self._tables:
            regular = [chunks.regular for _, chunks in self._entries[number]]
            known = [tensor for tensor in regular if tensor is not None]
            self._tables[number] = _FileTable(known) if len(known) == len(regular) else None
        return self._tables[number]

    def drop(self, file: str) -> None:
        """Remove a file from the index, to free memory."""
        self._positions.pop(file, None)
