"""Chunks: which file, byte offset and strides store each block of one tensor.

Callers see the chunks of every tensor through `Chunks`, whether they are listed one by one
(`ListedChunks`) or computed from a few numbers (`layouts.runs.EqualRuns`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, sub
from typing import NamedTuple, Protocol, overload

from reshard.core.box import Box, Index, flat_span, row_major
from reshard.core.dtypes import DType


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored block of a logical tensor.

    Args:
        box: the block's origin and shape in the tensor, in elements.
        file: path of the file that stores the block.
        byte_offset: offset of the block's first element in the file.
        byte_strides: distance in the file between neighbours along each dimension.
        factor: number by which a stored element is multiplied to give the tensor's value.
    """

    box: Box
    file: str
    byte_offset: int
    byte_strides: Index
    dtype: DType
    factor: float = 1.0

    @property
    def byte_span(self) -> tuple[int, int]:
        """The smallest file interval ``[start, stop)`` that holds every element of the chunk."""
        if self.box.volume == 0:
            return self.byte_offset, self.byte_offset
        reach = sum((n - 1) * s for n, s in zip(self.box.shape, self.byte_strides, strict=True))
        return self.byte_offset, self.byte_offset + reach + self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the file stores the block's elements in row-major order without gaps."""
        steps = row_major(self.box.shape, self.dtype.itemsize)
        dims = zip(self.box.shape, self.byte_strides, steps, strict=True)
        return all(extent == 1 or stride == step for extent, stride, step in dims)


def contiguous(file: str, byte_offset: int, dtype: DType, box: Box) -> Chunk:
    """Return a chunk whose elements the file stores one after the other, in row-major order."""
    return Chunk(box, file, byte_offset, row_major(box.shape, dtype.itemsize), dtype)


def group_by_box(chunks: Iterable[Chunk]) -> dict[Box, list[Chunk]]:
    """Return box -> the chunks that store it, without chunks that have no elements."""
    copies: dict[Box, list[Chunk]] = {}
    for chunk in chunks:
        if chunk.box.volume:
            copies.setdefault(chunk.box, []).append(chunk)
    return copies


def find_boxes(chunks: Iterable[Chunk]) -> frozenset[Box]:
    """Return the boxes that chunks store, without boxes that have no elements."""
    return frozenset(chunk.box for chunk in chunks if chunk.box.volume)


ChunkPart = tuple[int, int, int, Box | None, DType]
"""A part of a tensor in one contiguous range of a file: byte offset, start and stop of the smallest
flat run that contains the part, the part's box (None if the part is the whole run), dtype.
"""


class Regular(NamedTuple):
    """Parts that follow from their positions, shared by all tensors with the same `file_table`.

    The part at a position begins at element ``position * step`` and, in its file, ``skipped`` bytes
    after ``byte_offsets[position]``. It has ``step`` elements at positions before ``full``, fewer
    at ``full``, and none from ``filled`` on; ``nbytes`` is the size of a full part.
    """

    byte_offsets: Sequence[int]
    skipped: int
    nbytes: int
    step: int
    full: int
    filled: int


Run = tuple[int, int, str, int, DType, float]
"""Elements of a flattened tensor that a file stores one after the other: start, stop, file, byte
offset, dtype, factor (see `Chunk`).
"""


class ChunkIndex(Protocol):
    """An index of the distinct chunks of one tensor, in flat order; replicas are left out."""

    @property
    def is_flat(self) -> bool:
        """Whether every chunk is a contiguous run of the flattened tensor."""

    @property
    def widest(self) -> int:
        """The largest itemsize of a chunk, in bytes."""

    def find_overlapping(self, start: int, stop: int) -> Iterable[Chunk]:
        """Return the chunks that can overlap elements `start` to `stop`; a few may not."""

    def find_runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the stored runs of elements `start` to `stop`, in order; only if `is_flat`.

        Runs that are adjacent in the tensor and in one file are yielded as one.
        """


class FileSizes:
    """The sizes of files, and the room behind an offset in each of many files.

    Args:
        size_of: returns the size of a file in bytes.
    """

    def __init__(self, size_of: Callable[[str], int]) -> None:
        self.size_of = size_of
        # By the id of the offsets, which are kept, so that no other object gets the same id.
        self._rooms: dict[int, tuple[Sequence[int], int, int]] = {}

    def find_room(self, files: Sequence[str], byte_offsets: Sequence[int]) -> tuple[int, int]:
        """Return the least offset, and the least number of bytes from an offset to its file's end.

        Thousands of tensors share one sequence of offsets, so the answer is kept.
        """
        if id(byte_offsets) not in self._rooms:
            room = min(map(sub, map(self.size_of, files), byte_offsets))
            self._rooms[id(byte_offsets)] = byte_offsets, min(byte_offsets), room
        return self._rooms[id(byte_offsets)][1:]


class Chunks(ABC):
    """The chunks of one tensor: listed one by one, or computed from a few numbers."""

    __slots__ = ()

    is_partition = False
    """Whether a rule cuts the tensor into runs, so that every element is stored exactly once."""

    @property
    @abstractmethod
    def dtypes(self) -> set[DType]:
        """The dtypes of the stored elements."""

    @property
    @abstractmethod
    def stored_numel(self) -> int:
        """The number of stored elements; the elements of a replica count again."""

    @property
    @abstractmethod
    def part_count(self) -> int:
        """The number of parts in the files."""

    @property
    @abstractmethod
    def file_table(self) -> tuple[int, Sequence[str]]:
        """The file of each position, and a number that identifies this sequence of files."""

    @abstractmethod
    def part(self, position: int) -> ChunkPart | None:
        """Return the part at a position of the `file_table`, or None if it is empty."""

    @property
    def regular(self) -> Regular | None:
        """How the parts follow from their positions, if they do."""
        return None

    @abstractmethod
    def find_strided(self) -> Chunk | None:
        """Return a chunk that is not contiguous in its file, or None."""

    @property
    def cut_boxes(self) -> Iterable[Box]:
        """The boxes that are not runs of the flattened tensor."""
        return ()

    @abstractmethod
    def find_unproven(self, sizes: FileSizes) -> Iterable[Chunk]:
        """Return the chunks that may be outside of the tensor or of their file."""

    @abstractmethod
    def build_index(self) -> ChunkIndex:
        """Return an index of the chunks."""


class ComputedChunks(Chunks, Sequence[Chunk]):
    """A sequence of chunks that is computed from a few numbers.

    A thousand parameters on thousands of ranks are millions of chunks, so a chunk is built only
    when it is indexed. A subclass yields its chunks by ``__iter__``.
    """

    __slots__ = ()

    def find_strided(self) -> Chunk | None:
        """Return None: every chunk is contiguous in its file."""
        return None

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        # Callers often need the first chunk only, and a tensor has one or more for each rank.
        if index == 0 and self:
            return next(iter(self))
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, ComputedChunks)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Partition(ComputedChunks):
    """Chunks without replicas: every element of the tensor is in exactly one of them."""

    __slots__ = ()

    is_partition = True


@dataclass(frozen=True, slots=True)
class ListedChunks(Chunks):
    """Chunks that are listed one by one, in any order, with the shape of the tensor."""

    chunks: tuple[Chunk, ...]
    shape: Index

    @property
    def dtypes(self) -> set[DType]:
        """The dtypes of the stored elements."""
        return {chunk.dtype for chunk in self.chunks}

    @property
    def stored_numel(self) -> int:
        """The number of stored elements; the elements of a replica count again."""
        return sum(chunk.box.volume for chunk in self.chunks)

    @property
    def part_count(self) -> int:
        """The number of chunks with at least one element."""
        return sum(1 for chunk in self.chunks if chunk.box.volume)

    @property
    def file_table(self) -> tuple[int, Sequence[str]]:
        """The file of every chunk; no other tensor has the same table."""
        return id(self.chunks), [chunk.file for chunk in self.chunks]

    def part(self, position: int) -> ChunkPart | None:
        """Return the chunk at a position as a part, or None if it is empty."""
        chunk = self.chunks[position]
        if not chunk.box.volume:
            return None
        start, stop = flat_span(chunk.box, self.shape)
        return chunk.byte_offset, start, stop, chunk.box, chunk.dtype

    @property
    def cut_boxes(self) -> Iterable[Box]:
        """The boxes that are not runs of the flattened tensor."""
        boxes = (chunk.box for chunk in self.chunks)
        return [box for box in boxes if not box.is_run(self.shape)]

    def find_strided(self) -> Chunk | None:
        """Return a chunk that is not contiguous in its file, or None."""
        for chunk in self.chunks:
            if chunk.byte_strides != row_major(chunk.box.shape, chunk.dtype.itemsize):
                return chunk
        return None

    def find_unproven(self, sizes: FileSizes) -> Iterable[Chunk]:  # noqa: ARG002
        """Return all chunks."""
        return self.chunks

    def build_index(self) -> ChunkIndex:
        """Return an index of the chunks, sorted by their position in the flattened tensor."""
        return SortedChunks(self)


class SortedChunks:
    """An index of chunks that are listed; it implements `ChunkIndex`."""

    def __init__(self, listed: ListedChunks) -> None:
        distinct: dict[Box, Chunk] = {}
        for chunk in listed.chunks:
            if chunk.box.volume:  # of several replicas, the first is read; see `replicas.check`
                distinct.setdefault(chunk.box, chunk)
        spans = sorted(
            ((*flat_span(box, listed.shape), box) for box in distinct), key=itemgetter(0)
        )
        self._starts = [start for start, _, _ in spans]
        self._stops = [stop for _, stop, _ in spans]
        # For each chunk: the largest stop of this chunk and of those before it. Chunks may nest, so
        # the stops themselves are not sorted and cannot be bisected.
        self._reaches = list(accumulate(self._stops, max))
        self._chunks = [distinct[box] for *_, box in spans]
        self.widest = max((chunk.dtype.itemsize for chunk in self._chunks), default=1)
        self.is_flat = all(
            stop - start == box.volume and distinct[box].is_dense for start, stop, box in spans
        )

    def find_overlapping(self, start: int, stop: int) -> Iterable[Chunk]:
        """Return the chunks that can overlap elements `start` to `stop`; a few may not."""
        return self._chunks[self._between(start, stop)]

    def find_runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the stored runs of elements `start` to `stop`, in order; only if `is_flat`."""
        numbers = self._between(start, stop)
        last: Run | None = None
        for number in range(numbers.start, numbers.stop):
            chunk, begin = self._chunks[number], self._starts[number]
            low, high = max(start, begin), min(stop, self._stops[number])
            offset = chunk.byte_offset + (low - begin) * chunk.dtype.itemsize
            if last is not None:
                if _continues(last, low, offset, chunk):
                    last = (last[0], high, *last[2:])
                    continue
                yield last
            last = low, high, chunk.file, offset, chunk.dtype, chunk.factor
        if last is not None:
            yield last

    def _between(self, start: int, stop: int) -> slice:
        """Return the positions of the chunks that can overlap elements `start` to `stop`."""
        return slice(bisect_right(self._reaches, start), bisect_left(self._starts, stop))


def _continues(run: Run, start: int, byte_offset: int, chunk: Chunk) -> bool:
    first, stop, file, offset, dtype, factor = run
    return (
        stop == start
        and file == chunk.file
        and offset + (stop - first) * dtype.itemsize == byte_offset
        and dtype == chunk.dtype
        and factor == chunk.factor
    )
