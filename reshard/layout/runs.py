"""A tensor in equal runs, a rank each: held as a few numbers, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import sub
from typing import overload

from reshard.box import Index, run_boxes
from reshard.dtypes import DType
from reshard.layout.partition import equal_piece
from reshard.manifest import Chunk, Partition, SourceFile, contiguous


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """A file a rank, and the byte at which something of each rank begins in it.

    All tensors that lie there share it.
    """

    files: tuple[str, ...]
    byte_offsets: Sequence[int]


class Runs(Partition):
    """A tensor in ``ceil(numel / ranks)`` elements a rank (see `partition.equal_piece`).

    Args:
        places: where each rank's flat tensor begins.
        skipped: bytes of it that come before this tensor's run, on every rank.
    """

    __slots__ = ("dtype", "numel", "places", "shape", "skipped", "step")

    def __init__(self, places: Places, dtype: DType, shape: Index, skipped: int) -> None:
        self.places = places
        self.dtype = dtype
        self.shape = shape
        self.skipped = skipped
        self.numel = prod(shape)
        self.step = -(-self.numel // len(places.files))

    def run(self, rank: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of the flattened tensor that a rank holds."""
        return equal_piece(self.numel, len(self.places.files), rank)

    def byte_offset(self, rank: int) -> int:
        """Where they begin in the rank's file."""
        return self.places.byte_offsets[rank] + self.skipped

    def ranks(self, start: int, stop: int) -> range:
        """Who holds a part of the run ``[start, stop)``."""
        return range(start // self.step, -(-stop // self.step)) if start < stop else range(0)

    def of_rank(self, rank: int) -> Iterator[Chunk]:
        """One rank's run as blocks."""
        at = self.byte_offset(rank)
        for box in run_boxes(self.shape, *self.run(rank)):
            yield contiguous(self.places.files[rank], at, self.dtype, box, box.shape)
            at += box.volume * self.dtype.itemsize

    def outside(self, files: Mapping[str, SourceFile]) -> Chunk | None:
        """A chunk that does not lie inside its file, if there is one."""
        places, size = self.places, self.dtype.itemsize
        room = (files[file].nbytes for file in places.files)
        if (
            min(places.byte_offsets) + self.skipped >= 0
            and min(map(sub, room, places.byte_offsets)) >= self.skipped + self.step * size
        ):
            return None
        for chunk in self:  # the last ranks hold less than a step
            start, stop = chunk.byte_span
            if start < 0 or stop > files[chunk.file].nbytes:
                return chunk
        return None

    def __iter__(self) -> Iterator[Chunk]:
        for rank in self.ranks(0, self.numel):
            yield from self.of_rank(rank)

    def __len__(self) -> int:
        row = prod(self.shape[1:])
        in_rows = len(self.shape) <= 2 and self.step and row % self.step == 0
        if self.step and (in_rows or self.step % row == 0):  # one box a rank
            return len(self.ranks(0, self.numel))
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return self.numel > 0

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if index == 0 and self:
            return next(iter(self))
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, Runs)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Runs(numel={self.numel}, ranks={len(self.places.files)})"
