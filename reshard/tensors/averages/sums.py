"""Means of rows of values: by the compiled module ``_sums``, if this installation has it, or numpy.

Both give the same bits: sums are in float64, and a product and a sum are rounded one after the
other. The compiled module needs no import of numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from reshard.core.dtypes import FLOAT32, DType
from reshard.system.compiled import find_compiled

_compiled = find_compiled("reshard.tensors.averages._sums")


def average(
    values: memoryview, factors: Sequence[float], divisor: float, dtype: DType, means: memoryview
) -> bool:
    """Write the sums of the products of values and factors, divided by a number.

    Args:
        values: the bytes of a row of values for each factor.
        factors: the number by which each row is multiplied in float64.
        divisor: the number by which the sums are divided in float64.
        dtype: the dtype of values and means: float32 or float64.
        means: the bytes to write, as many as a row has.

    Returns:
        Whether all means are finite.
    """
    if _compiled is not None and dtype == FLOAT32:
        return bool(_compiled.average(values, array("d", factors), divisor, means))
    import numpy as np

    rows = np.frombuffer(values, f"<f{dtype.itemsize}").reshape(len(factors), -1)
    out = np.frombuffer(means, rows.dtype)
    with np.errstate(over="ignore"):  # the caller learns of infinities
        sums = np.multiply(rows[0], factors[0], dtype=np.float64)
        for row, factor in zip(rows[1:], factors[1:], strict=True):
            sums += np.multiply(row, factor, dtype=np.float64)
        np.copyto(out, np.divide(sums, divisor, out=sums), casting="same_kind")
    return bool(np.isfinite(out).all())
