"""The geometry of a quantised weight: where its codes and scales are, and which belong together."""

from __future__ import annotations

from typing import NamedTuple

from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, FLOAT32, DType

E2M1 = "e2m1"  # OCP Microscaling Formats 1.0
INT4, INT8 = "biased int4", "biased int8"  # compressed-tensors adds 8 or 128 to what it packs
BITS = {INT4: 4, INT8: 8}


class Scaled(NamedTuple):
    """A weight whose values are codes times the scale of their block.

    A weight is a number of matrices, one after the other. Blocks at the end of a row or column can
    be smaller than the others.

    Args:
        fqn: the name of the weight, for messages.
        codes: the stored codes, row-major.
        scales: the stored scales, row-major: a grid for each matrix.
        matrices: the number of matrices.
        rows: the rows of a matrix as stored.
        columns: the values in a row as stored.
        block: the rows and columns of a block.
        code: what a code is: `E2M1`, `INT4`, `INT8`, or the name of the stored dtype.
        transposed: whether the weight has each matrix transposed.
        shared: whether all matrices have one grid of scales.
        factor, divisor: numbers by which every scale is multiplied and divided, in float32.
        zeros: integers to subtract from the codes, one for each scale and each row, packed along
            the columns of their grid as the codes are along the rows of theirs; or None.
    """

    fqn: str
    codes: Chunk
    scales: Chunk
    matrices: int
    rows: int
    columns: int
    block: tuple[int, int]
    code: str
    transposed: bool = False
    shared: bool = False
    factor: float = 1.0
    divisor: float = 1.0
    zeros: Chunk | None = None

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes of 4 bits, the lower bits first."""
        return self.code in (E2M1, INT4)

    @property
    def grid(self) -> tuple[int, int]:
        """The blocks in a column and in a row of a matrix."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def row_nbytes(self) -> int:
        """The bytes of codes in a row as stored."""
        return self.columns // (2 if self.packed else 1)

    @property
    def dtype(self) -> DType:
        """The dtype of the values, in which all of them are exact."""
        return BFLOAT16 if self.packed and self.transposed else FLOAT32

    @property
    def value_block(self) -> tuple[int, int]:
        """The rows and columns of a block in a matrix of the weight, which may be transposed."""
        high, wide = self.block
        return (wide, high) if self.transposed else (high, wide)

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.matrices * self.rows * self.columns
