"""Ranks in a grid of pipeline stage, data, expert and tensor, numbered as Megatron-LM does.

Tensor parallel ranks are neighbours, as they speak most, and pipeline stages lie farthest apart
(its order tp-cp-ep-dp-pp, megatron/core/parallel_state.py, core 0.16).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """How many ranks each axis has; their product is the world.

    >>> grid = Grid(pp=2, dp=2, tp=2)
    >>> grid.world, [grid.data_of(rank) for rank in range(8)], grid.readers
    (8, [0, 0, 1, 1, 0, 0, 1, 1], [0, 2])
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.cut

    @property
    def cut(self) -> int:
        """Ranks that a stage is cut over, before its data-parallel ranks share it."""
        return self.ep * self.tp

    @property
    def parallel(self) -> bool:
        """Whether the model itself is cut."""
        return self.pp * self.cut > 1

    def data_of(self, rank: int) -> int:
        """The rank's place on the data axis: ranks with the same place train the same samples."""
        return rank // self.cut % self.dp

    def stage_of(self, rank: int) -> int:
        """The rank's pipeline stage."""
        return rank // (self.cut * self.dp)

    def cut_of(self, rank: int) -> tuple[int, int]:
        """The rank's place on the tensor and on the expert axis."""
        return rank % self.tp, rank // self.tp % self.ep

    @property
    def readers(self) -> list[int]:
        """One rank for each place on the data axis, in its order."""
        return [place * self.cut for place in range(self.dp)]

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x ep {self.ep} x dp {self.dp}"
