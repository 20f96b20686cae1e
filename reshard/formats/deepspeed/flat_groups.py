"""Flat groups of ZeRO stages 1 and 2: what each rank stores, and states about it (read and write).

Geometry (DeepSpeed 0.19.8 ``stage_1_and_2.py``, ``bf16_optimizer.py``): a group's parameters one
after the other, each followed by its alignment padding, then a tail that makes the whole a multiple
of twice the ranks that share it; a rank holds an equal partition. Masters are stored without the
tail, slots with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from reshard.containers.torch_objects import Tensor
from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.core.manifest import Entry
from reshard.layouts.partition import run_chunks

ALIGNMENT = 2  # nccl_start_alignment_factor
MAPPINGS = "param_slice_mappings"


class Run(NamedTuple):
    """The elements ``[start, stop)`` of a member, which begin at an element of a rank's tensor."""

    fqn: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """A group's flat tensor, of which each rank that shares it stores an equal partition.

    Args:
        shapes: fqn -> shape, in flat order.
        ranks: how many ranks share it: all, or those that hold the same experts.
        paddings: the elements after each member.
        alignment: the number of elements that partitions are multiples of.
        books_on_last: whether the last rank states the whole tail (DeepSpeed up to 0.15.4). If that
            is more than a partition, the bound of the slice ``[:numel - tail]`` is negative and
            counts from the end: the rank keeps elements that are padding as well.
        keeps_tail: whether masters are stored with the tail (BF16_Optimizer).
    """

    shapes: Mapping[str, Index]
    ranks: int
    paddings: Sequence[int]
    alignment: int = ALIGNMENT
    books_on_last: bool = False
    keeps_tail: bool = False

    @cached_property
    def end(self) -> int:
        """The element after the last member and its padding."""
        return sum(map(prod, self.shapes.values())) + sum(self.paddings)

    @cached_property
    def numel(self) -> int:
        """The elements of a partition, which is the length of a rank's slots."""
        return -(-self.end // (self.alignment * self.ranks)) * self.alignment

    @cached_property
    def runs(self) -> list[list[Run]]:
        """What each rank's partition has of each member; of empty members, those inside it."""
        runs: list[list[Run]] = [[] for _ in range(self.ranks)]
        at, numel = 0, self.numel or 1
        for (fqn, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            end = at + prod(shape)
            for position in range(at // numel, -(-end // numel)):
                low, high = position * numel, (position + 1) * numel
                start, stop = max(at, low), min(end, high)
                runs[position].append(Run(fqn, start - at, stop - at, start - low))
            at = end + padding
        return runs

    @cached_property
    def whole_runs(self) -> list[list[Run]]:
        """The members that meet each rank's partition, whole and without padding.

        DeepSpeed's Muon keeps its momentum so (``_muon_momentum_buffer``).
        """
        found = []
        for runs in self.runs:
            at, own = 0, list[Run]()
            for fqn in (run.fqn for run in runs if run.stop > run.start):
                own.append(Run(fqn, 0, prod(self.shapes[fqn]), at))
                at += own[-1].stop
            found.append(own)
        return found

    def count_tail(self, position: int) -> int:
        """Return how many elements of the tail are booked on a rank."""
        if self.books_on_last:
            return self.numel * self.ranks - self.end if position == self.ranks - 1 else 0
        return min(max((position + 1) * self.numel - self.end, 0), self.numel)

    def count_stored(self, position: int) -> int:
        """Return the length of a rank's master weights."""
        tail = 0 if self.keeps_tail else self.count_tail(position)
        return len(range(self.numel)[: self.numel - tail])

    def count_whole(self, position: int) -> int:
        """Return how many elements the members that meet a rank's partition have."""
        return sum(run.stop for run in self.whole_runs[position])

    def derive(self, position: int) -> dict[str, Any]:
        """Return what a rank's file states about its partition: key -> the value of the group.

        A fragment of a parameter is stated as (start in the partition, number of elements).
        """
        return {
            "group_paddings": self.count_tail(position),
            "param_alignment_paddings": list(self.paddings),
            "partition_count": self.ranks,
            MAPPINGS: {
                fqn: (offset, stop - start) for fqn, start, stop, offset in self.runs[position]
            },
        }

    def split(
        self, kind: str, pieces: Sequence[Tensor | None], runs: Sequence[Sequence[Run]]
    ) -> Iterator[Entry]:
        """Yield the entries of all members.

        Args:
            pieces: the tensor of each rank.
            runs: what is in each rank's tensor.
        """
        chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in self.shapes}
        for piece, own in zip(pieces, runs, strict=True):
            if piece is None:
                continue
            stored = piece.chunk
            for fqn, start, stop, offset in own:
                chunks[fqn] += run_chunks(stored, offset, self.shapes[fqn], start, stop)
        dtype = next(piece.dtype for piece in pieces if piece)
        for fqn, shape in self.shapes.items():
            yield Entry(fqn, kind, dtype, shape, tuple(chunks[fqn]))
