"""A grid of ranks with axes pipeline, data, expert and tensor, numbered as in Megatron-LM.

Tensor-parallel ranks are neighbors, because they communicate most, and pipeline stages are farthest
apart (order tp-cp-ep-dp-pp, megatron/core/parallel_state.py, core 0.16).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The size of each axis; their product is the world size.

    >>> grid = Grid(pp=2, dp=2, tp=2)
    >>> grid.world, [grid.data_index(rank) for rank in range(8)], grid.data_ranks
    (8, [0, 0, 1, 1, 0, 0, 1, 1], [0, 2])
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.pp * self.dp * self.cut

    @property
    def cut(self) -> int:
        """Number of ranks that the layers of one stage are cut over."""
        return self.ep * self.tp

    @property
    def cuts_model(self) -> bool:
        """Whether the model itself is cut, by tensor, stage or expert."""
        return self.pp * self.cut > 1

    def data_index(self, rank: int) -> int:
        """Return the index on the data axis: ranks with the same index train the same samples."""
        return rank // self.cut % self.dp

    def stage_index(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.cut * self.dp)

    def tensor_and_expert_index(self, rank: int) -> tuple[int, int]:
        """Return the indices of a rank on the tensor and on the expert axis."""
        return rank % self.tp, rank // self.tp % self.ep

    @property
    def data_ranks(self) -> list[int]:
        """One rank for each index on the data axis, in its order."""
        return [index * self.cut for index in range(self.dp)]

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x ep {self.ep} x dp {self.dp}"
