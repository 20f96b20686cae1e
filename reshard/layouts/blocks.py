"""Tensors of which each rank stores one block in its own file, as FSDP 2 and DCP do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from reshard.core.box import Box, Index, flat_span
from reshard.core.chunks import (
    Chunk,
    ChunkIndex,
    ChunkPart,
    ComputedChunks,
    FileSizes,
    ListedChunks,
    SortedChunks,
    contiguous,
)
from reshard.core.dtypes import DType


class RankBoxes:
    """The boxes that the ranks store of a tensor; all tensors of its shape and cuts share them.

    Args:
        boxes: one for each rank, in rank order; the last ranks may have none.
    """

    def __init__(self, shape: Index, boxes: Sequence[Box]) -> None:
        self.shape = shape
        self.boxes = boxes
        spans = (flat_span(box, shape) for box in boxes)
        # A rank without elements has no part.
        self.parts = [
            (*span, box) if box.volume else None for span, box in zip(spans, boxes, strict=True)
        ]
        filled = [box for box in boxes if box.volume]
        self.part_count = len(filled)
        self.numel = sum(box.volume for box in filled)
        self.cut = tuple(box for box in filled if not box.is_run(shape))


class RankBlocks(ComputedChunks):
    """The chunks of a tensor: a contiguous block in the file of each rank.

    Args:
        files: the file of each rank; all tensors in these files share one sequence.
        find_offset: returns where a rank's block begins in its file.
    """

    __slots__ = ("_boxes", "_dtype", "_files", "_find_offset")

    def __init__(
        self,
        files: Sequence[str],
        boxes: RankBoxes,
        find_offset: Callable[[int], int],
        dtype: DType,
    ) -> None:
        self._files = files
        self._boxes = boxes
        self._find_offset = find_offset
        self._dtype = dtype

    @property
    def dtypes(self) -> set[DType]:
        """The dtype of all elements."""
        return {self._dtype}

    @property
    def stored_numel(self) -> int:
        """The number of stored elements; the elements of a replica count again."""
        return self._boxes.numel

    @property
    def part_count(self) -> int:
        """The number of ranks that store at least one element."""
        return self._boxes.part_count

    @property
    def file_table(self) -> tuple[int, Sequence[str]]:
        """The file of every rank."""
        return id(self._files), self._files

    def part(self, position: int) -> ChunkPart | None:
        """Return the block of a rank, or None if it is empty."""
        parts = self._boxes.parts
        part = parts[position] if position < len(parts) else None
        return part and (self._find_offset(position), *part, self._dtype)

    @property
    def cut_boxes(self) -> Iterable[Box]:
        """The boxes that are not runs of the flattened tensor."""
        return self._boxes.cut

    def find_unproven(self, sizes: FileSizes) -> Iterable[Chunk]:  # noqa: ARG002
        """Return all chunks."""
        return self

    def build_index(self) -> ChunkIndex:
        """Return an index of the chunks, sorted by their position in the flattened tensor."""
        return SortedChunks(ListedChunks(tuple(self), self._boxes.shape))

    def __iter__(self) -> Iterator[Chunk]:
        for rank, box in enumerate(self._boxes.boxes):
            if box.volume:
                yield contiguous(self._files[rank], self._find_offset(rank), self._dtype, box)

    def __len__(self) -> int:
        return self._boxes.part_count
