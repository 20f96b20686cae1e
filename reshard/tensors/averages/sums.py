"""Means of rows of values: by the compiled module ``_sums``, if it is installed, or numpy.

Both give the same bits: means are computed in float64, and a product and a sum are rounded one
after the other. The compiled module needs no import of numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from reshard.core.dtypes import FLOAT32, DType
from reshard.system.compiled import LETTERS, find_compiled

_compiled = find_compiled("reshard.tensors.averages._sums")


def average(
    values: memoryview,
    dtypes: Sequence[DType],
    factors: Sequence[float],
    divisor: float,
    dtype: DType,
    means: memoryview,
) -> bool:
    """Write the sums of the products of values and factors, divided by a number.

    Args:
        values: the bytes of rows of values, one row after the other.
        dtypes: the dtype of each row.
        factors: the number by which each row is multiplied in float64.
        divisor: the number by which the sums are divided in float64.
        dtype: the dtype of the means: float32, or float64 if a row has it.
        means: the bytes to write, an element for each column.

    Returns:
        Whether all means are finite.
    """
    if _compiled is not None and dtype == FLOAT32:
        letters = "".join([LETTERS[stored.name] for stored in dtypes])
        return bool(_compiled.average(values, letters, array("d", factors), divisor, means))
    import numpy as np

    from reshard.engine.move.cast import as_numbers, get_numpy_dtype

    out = np.frombuffer(means, get_numpy_dtype(dtype, casting=True))
    sums, at = np.full(out.size, -0.0), 0  # -0 and a product have the sum of the product, also -0
    with np.errstate(over="ignore"):  # the caller learns of infinities
        for stored, factor in zip(dtypes, factors, strict=True):
            row = np.frombuffer(values, get_numpy_dtype(stored, casting=True), out.size, at)
            sums += np.multiply(as_numbers(row, stored), factor, dtype=np.float64)
            at += row.nbytes
        np.copyto(out, np.divide(sums, divisor, out=sums), casting="same_kind")
    return bool(np.isfinite(out).all())
