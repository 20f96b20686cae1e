"""Find how the scales of a weight are spread over it: one for each block, or one for all."""

from __future__ import annotations

from typing import NamedTuple

from reshard.core.box import Index
from reshard.core.manifest import Entry
from reshard.errors import CorruptError

_FUSED = "gate_up_proj"  # transformers concatenates a gate's blocks and those of its up projection


class Geometry(NamedTuple):
    """The division of a weight into blocks, of which each has a scale.

    Args:
        block: the rows and columns of a block.
        cuts: the number of parts, along the rows, whose blocks begin anew.
        shared: whether one scale stands for all matrices.
    """

    block: tuple[int, int]
    cuts: int = 1
    shared: bool = False


def fit_grid(
    fqn: str, shape: Index, scales: Entry, scales_shape: Index, block: tuple[int, int] | None
) -> Geometry:
    """Return how the scales are spread over a weight.

    Args:
        fqn: the name of the weight.
        shape: the shape of the weight.
        scales: its scales.
        scales_shape: their shape, with the blocks of a matrix in the last two dims.
        block: the rows and columns of a block; None if they follow from the shapes.

    Raises:
        CorruptError: they do not fit it.
    """
    rows, columns = shape[-2:]
    if scales.numel == 1:
        return Geometry((max(rows, 1), max(columns, 1)), shared=True)
    lead, grid = scales_shape[:-2], scales_shape[-2:]
    if len(scales_shape) == len(shape) and lead == shape[:-2]:
        stated = block or _derive_block((rows, columns), grid)
        if stated is not None:
            down, across = count_blocks((rows, columns), stated)
            half, odd = divmod(rows, 2)
            halves = (2 * -(-half // stated[0]), across)
            if fqn.endswith(_FUSED) and not odd and grid == halves:
                return Geometry(stated, cuts=2)
            if grid == (down, across):
                return Geometry(stated)
    expected = count_blocks((rows, columns), block) if block else "one, or an even grid"
    size = f"blocks of {block[0]} x {block[1]}" if block else "no weight_block_size"
    raise CorruptError(
        scales.where,
        f"{scales.fqn!r}: scales of shape {scales.shape} do not fit {fqn!r} of shape {shape} with"
        f" {size}: expected {expected}",
        "config.json is of another model, or the file is damaged: fetch both again",
    )


def count_blocks(size: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the blocks in a column and in a row of a matrix; the last ones can be smaller."""
    return -(-size[0] // block[0]), -(-size[1] // block[1])


def _derive_block(size: tuple[int, ...], grid: Index) -> tuple[int, int] | None:
    if not all(grid) or size[0] % grid[0] or size[1] % grid[1]:
        return None
    return max(size[0] // grid[0], 1), max(size[1] // grid[1], 1)
