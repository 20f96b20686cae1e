"""Sums in float64: by the compiled module ``_sums``, if this installation has it, or with numpy.

Both give the same bits: a product and a sum are rounded one after the other.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _find_compiled() -> ModuleType | None:
    try:
        from reshard.tensors.averages import _sums
    except ImportError:  # there was no C compiler at the installation
        return None
    return _sums


_compiled = _find_compiled()


def add(values: Array, sums: Array, factor: float, *, begins: bool) -> None:
    """Add the products of values and a factor to sums.

    Args:
        values: float32 or float64, contiguous.
        sums: float64, contiguous; undefined before the first values.
        factor: the number by which each value is multiplied in float64.
        begins: whether these are the first values.
    """
    if _compiled is not None and values.itemsize == np.float32().itemsize:
        _compiled.add(values, sums, factor, begins)
    elif begins:
        np.multiply(values, factor, out=sums, dtype=np.float64)
    else:
        sums += np.multiply(values, factor, dtype=np.float64)


def divide(sums: Array, divisor: float, means: Array) -> bool:
    """Write sums divided by a number, rounded to the dtype of the means: float32 or float64.

    Returns:
        Whether all means are finite.
    """
    if _compiled is not None and means.itemsize == np.float32().itemsize:
        return bool(_compiled.divide(sums, divisor, means))
    with np.errstate(over="ignore"):  # the caller learns of infinities
        np.copyto(means, np.divide(sums, divisor, out=sums), casting="same_kind")
    return bool(np.isfinite(means).all())
