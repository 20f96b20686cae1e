"""Sums of a weight and of the product of two matrices: by the compiled module or by numpy.

Both give the same bits, on every processor: a sum in float32 begins with 0, the products are
rounded and added one after the other, and the value of the weight is added last. Matrix products of
BLAS would depend on the processor and on the number of threads. The compiled module needs no import
of numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.core.dtypes import BFLOAT16, FLOAT32, DType
from reshard.system.compiled import LETTERS, find_compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_compiled = find_compiled("reshard.tensors.adapters._arithmetic")
_BLOCK = 1 << 15  # elements that numpy computes at a time, in the cache


def add_product(
    values: memoryview,
    dtype: DType,
    left: memoryview,
    right: memoryview,
    rank: int,
    scale: float,
    sums: memoryview,
    sum_dtype: DType,
) -> int | None:
    """Write ``values + (scale * left) @ right``, computed in float32.

    Args:
        values: the bytes of a matrix (rows, columns), row-major as all of them.
        dtype: its dtype: float32, float16 or bfloat16.
        left: the bytes of a float32 matrix (rows, rank).
        right: the bytes of a float32 matrix (rank, columns).
        rank: the number of products in a sum, at least 1.
        scale: a factor, which is rounded to float32.
        sums: the bytes to write, (rows, columns); not the memory of another matrix.
        sum_dtype: the dtype of the sums, float32 or bfloat16, to which they are rounded.

    Returns:
        How many finite sums became infinite when they were rounded; None if a sum is not finite.
    """
    if _compiled is not None:
        arguments = left, right, rank, scale, sums, sum_dtype.itemsize
        overflowed = _compiled.add_product(values, LETTERS[dtype.name], *arguments)
        return None if overflowed < 0 else int(overflowed)
    import numpy as np

    from reshard.engine.move.cast import as_numbers, cast, get_numpy_dtype

    factors = np.frombuffer(left, "<f4").reshape(-1, rank) * np.float32(scale)
    columns = np.frombuffer(right, "<f4").reshape(rank, -1)
    shape = len(factors), columns.shape[1]
    base = np.frombuffer(values, get_numpy_dtype(dtype, casting=True)).reshape(shape)
    out = np.frombuffer(sums, get_numpy_dtype(sum_dtype, casting=True)).reshape(shape)
    height, overflowed = max(_BLOCK // max(shape[1], 1), 1), 0
    for first in range(0, shape[0], height):
        rows = slice(first, first + height)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller learns of them
            made = _multiply(factors[rows], columns)
            np.add(as_numbers(base[rows], dtype), made, out=made, dtype=np.float32)
        if not np.isfinite(made).all():
            return None
        if sum_dtype == BFLOAT16:
            overflowed += cast(made, out[rows], FLOAT32, BFLOAT16, clamp=False)[0]
        else:
            out[rows] = made
    return overflowed


def _multiply(left: Array, right: Array) -> Array:
    """Return ``left @ right``, with the products added in order."""
    import numpy as np

    made = np.zeros((left.shape[0], right.shape[1]), "<f4")
    for column, row in zip(left.T, right, strict=True):
        made += column[:, None] * row
    return made


def set_row_lengths(rows: Array, lengths: Array) -> bool:
    """Scale every row to a length; return whether all values are finite then."""
    import numpy as np

    norms = np.sqrt(np.multiply(rows, rows).sum(axis=1, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        rows *= (lengths / norms).astype("<f4")[:, None]
    return bool(np.isfinite(rows).all())
