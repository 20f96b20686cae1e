"""Tensors that are cut into equal runs, one per rank, as DeepSpeed's ZeRO 3 stores them.

A few numbers describe all runs of a tensor, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from reshard.core.box import Index, run_boxes
from reshard.core.chunks import (
    Chunk,
    ChunkIndex,
    ChunkPart,
    FileSizes,
    Partition,
    Regular,
    Run,
    contiguous,
)
from reshard.core.dtypes import DType
from reshard.layouts.partition import compute_equal_piece


@dataclass(frozen=True, slots=True, eq=False)
class RankOffsets:
    """One file per rank, and the byte offset at which the rank's flat tensor begins in it.

    All tensors of the flat tensor share one instance.
    """

    files: tuple[str, ...]
    byte_offsets: Sequence[int]


class EqualRuns(Partition):
    """A tensor cut into ``ceil(numel / ranks)`` elements a rank (`partition.compute_equal_piece`).

    Args:
        offsets: where the flat tensor of each rank begins.
        skipped: bytes of the flat tensor that precede this tensor's run, the same on every rank.
    """

    __slots__ = ("dtype", "numel", "offsets", "shape", "skipped", "step")

    def __init__(self, offsets: RankOffsets, dtype: DType, shape: Index, skipped: int) -> None:
        self.offsets = offsets
        self.dtype = dtype
        self.shape = shape
        self.skipped = skipped
        self.numel = prod(shape)
        self.step = -(-self.numel // len(offsets.files))

    def run(self, rank: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of the flattened tensor that a rank stores."""
        return compute_equal_piece(self.numel, len(self.offsets.files), rank)

    def byte_offset(self, rank: int) -> int:
        """Return the byte offset of a rank's run in the rank's file."""
        return self.offsets.byte_offsets[rank] + self.skipped

    def ranks(self, start: int, stop: int) -> range:
        """Return the ranks that store a part of the elements ``[start, stop)``."""
        return range(start // self.step, -(-stop // self.step)) if start < stop else range(0)

    def of_rank(self, rank: int) -> Iterator[Chunk]:
        """Iterate over the chunks that make up one rank's run."""
        at = self.byte_offset(rank)
        for box in run_boxes(self.shape, *self.run(rank)):
            yield contiguous(self.offsets.files[rank], at, self.dtype, box)
            at += box.volume * self.dtype.itemsize

    @property
    def dtypes(self) -> set[DType]:
        """The dtype of all elements."""
        return {self.dtype}

    @property
    def stored_numel(self) -> int:
        """The number of elements of the tensor."""
        return self.numel

    @property
    def part_count(self) -> int:
        """The number of ranks that store at least one element."""
        return len(self.ranks(0, self.numel))

    @property
    def file_table(self) -> tuple[int, Sequence[str]]:
        """The file of every rank; all tensors of the flat tensor have the same table."""
        return id(self.offsets), self.offsets.files

    def part(self, position: int) -> ChunkPart | None:
        """Return the run of a rank, or None if it is empty."""
        start = position * self.step
        if start >= self.numel:
            return None
        stop = min(start + self.step, self.numel)
        offset = self.offsets.byte_offsets[position] + self.skipped
        return offset, start, stop, None, self.dtype

    def find_unproven(self, sizes: FileSizes) -> Iterable[Chunk]:
        """Return no chunk if every file has room for a full run, which is the usual case."""
        least, room = sizes.find_room(self.offsets.files, self.offsets.byte_offsets)
        # The runs of the last ranks are shorter than a step, so less room can be enough.
        full = self.skipped + self.step * self.dtype.itemsize
        return () if least + self.skipped >= 0 and room >= full else self

    @property
    def regular(self) -> Regular:
        """The runs of all ranks."""
        return Regular(
            self.offsets.byte_offsets,
            self.skipped,
            self.step * self.dtype.itemsize,
            self.step,
            # A tensor without elements has steps of 0.
            self.numel // max(self.step, 1),
            self.part_count,
        )

    def build_index(self) -> ChunkIndex:
        """Return this object: positions are computed, not searched."""
        return self

    @property
    def widest(self) -> int:
        """The itemsize in bytes."""
        return self.dtype.itemsize

    @property
    def is_flat(self) -> bool:
        """Whether every chunk is a contiguous run of the flattened tensor: always."""
        return True

    def find_overlapping(self, start: int, stop: int) -> Iterable[Chunk]:
        """Yield the chunks of the ranks that store a part of elements `start` to `stop`."""
        return (chunk for rank in self.ranks(start, stop) for chunk in self.of_rank(rank))

    def find_runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield one run for each rank that stores a part of elements `start` to `stop`."""
        step, dtype, files = self.step, self.dtype, self.offsets.files
        size, byte_offsets = dtype.itemsize, self.offsets.byte_offsets
        low = start
        while low < stop:
            rank, before = divmod(low, step)  # the run's elements that precede `start`
            high = min(low + step - before, stop)
            offset = byte_offsets[rank] + self.skipped + before * size
            yield low, high, files[rank], offset, dtype, 1.0
            low = high

    def __iter__(self) -> Iterator[Chunk]:
        for rank in self.ranks(0, self.numel):
            yield from self.of_rank(rank)

    def __len__(self) -> int:
        row = prod(self.shape[1:])
        in_rows = len(self.shape) <= 2 and self.step and row % self.step == 0
        if self.step and (in_rows or self.step % row == 0):  # each run is a single box
            return len(self.ranks(0, self.numel))
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return self.numel > 0

    def __repr__(self) -> str:
        return f"EqualRuns(numel={self.numel}, ranks={len(self.offsets.files)})"
