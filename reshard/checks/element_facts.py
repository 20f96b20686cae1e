"""Facts about the elements of a tensor: NaN, infinite, negative, all zero.

Elements are examined in blocks that stay in the CPU's cache; an ordinary block costs two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.core.dtypes import BFLOAT16, FLOAT16, DType
from reshard.engine.move import cast

_BLOCK = 1 << 18  # elements
_INFINITY = {BFLOAT16: 0x7F80, FLOAT16: 0x7C00}  # the bits of infinity; larger magnitudes are NaN
# float8 by name: the bits of infinity, and whether bits are NaN (torch 2.13
# ``torch/headeronly/util/Float8_*.h``). The fnuz forms have one NaN, where -0 would be.
_FLOAT8: dict[str, tuple[int | None, Callable[[int], bool]]] = {
    "float8_e5m2": (0x7C, lambda bits: bits & 0x7F > 0x7C),
    "float8_e4m3fn": (None, lambda bits: bits & 0x7F == 0x7F),
    "float8_e5m2fnuz": (None, lambda bits: bits == 0x80),
    "float8_e4m3fnuz": (None, lambda bits: bits == 0x80),
    "float8_e8m0fnu": (None, lambda bits: bits == 0xFF),
}
_WITHOUT_ZERO = "float8_e8m0fnu"  # an exponent alone


@dataclass(slots=True)
class ElementFacts:
    """Facts about the elements of a tensor, or of a block of it.

    Args:
        nan, infinite, negative: numbers of such elements; -0 is not negative.
        first_nonfinite: the flat index of the first element that is NaN or infinite.
        first_negative: the flat index of the first negative element.
    """

    nan: int = 0
    infinite: int = 0
    negative: int = 0
    first_nonfinite: int | None = None
    first_negative: int | None = None
    is_zero: bool = True

    def add(self, other: ElementFacts) -> None:
        """Add the facts about another block of the same tensor."""
        self.nan += other.nan
        self.infinite += other.infinite
        self.negative += other.negative
        self.is_zero = self.is_zero and other.is_zero
        self.first_nonfinite = _find_earlier(self.first_nonfinite, other.first_nonfinite)
        self.first_negative = _find_earlier(self.first_negative, other.first_negative)


def _find_earlier(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def examine(block: bytearray, dtype: DType, start: int, *, signs: bool) -> ElementFacts:
    """Examine the elements of a block.

    Args:
        block: contiguous elements of ``dtype``.
        start: the flat index of the first element.
        signs: whether to count negative elements.
    """
    step: str
    examine_block: Callable[[Any, DType, bool], tuple[Any, ...]]
    if dtype in _INFINITY:
        step, examine_block = "<u2", _examine_half
    elif dtype.family == "float":
        step, examine_block = cast.get_numpy_dtype(dtype, casting=True), _examine_float
    elif dtype.family == "complex":
        step, examine_block = f"<f{dtype.itemsize // 2}", _examine_float
    else:
        step, examine_block = "u1", _examine_float8 if dtype.family == "float8" else _examine_bytes
    parts = 2 if dtype.family == "complex" else 1
    parts = dtype.itemsize if examine_block is _examine_bytes else parts
    elements: Any = np.frombuffer(block, step)
    facts = ElementFacts()
    with np.errstate(all="ignore"):
        for at in range(0, elements.size, _BLOCK):
            is_zero, *masks = examine_block(elements[at : at + _BLOCK], dtype, signs)
            # Of the NaN, infinite and negative items, several of which make one element.
            counts = [0 if mask is None else int(mask.sum()) for mask in masks]
            firsts = [
                start + (at + int(mask.argmax())) // parts if count else None
                for mask, count in zip(masks, counts, strict=True)
            ]
            nan, infinite, negative = counts
            nonfinite = _find_earlier(firsts[0], firsts[1])
            facts.add(ElementFacts(nan, infinite, negative, nonfinite, firsts[2], is_zero))
    return facts


def _examine_float(values: Any, _dtype: DType, signs: bool) -> tuple[Any, ...]:
    low, high = values.min(), values.max()  # NaN if there is one
    # `not low >= 0` also holds where `low` is NaN.
    negative = values < 0 if signs and not low >= 0 else None
    if np.isfinite(low) and np.isfinite(high):
        return bool(low == high == 0), None, None, negative
    return False, np.isnan(values), np.isinf(values), negative


def _examine_half(bits: Any, dtype: DType, signs: bool) -> tuple[Any, ...]:
    magnitude = bits & 0x7FFF
    largest, infinity = magnitude.max(), _INFINITY[dtype]
    nan = magnitude > infinity if largest > infinity else None
    infinite = magnitude == infinity if largest >= infinity else None
    negative = (bits > 0x8000) & (magnitude <= infinity) if signs else None
    return bool(largest == 0), nan, infinite, negative


def _examine_float8(bits: Any, dtype: DType, _signs: bool) -> tuple[Any, ...]:
    infinity, is_nan = _FLOAT8[dtype.name]
    nan = np.array([is_nan(number) for number in range(256)])[bits]
    infinite = bits & 0x7F == infinity if infinity is not None else None
    zero = (bits & 0x7F == 0) & ~nan & (dtype.name != _WITHOUT_ZERO)
    return bool(zero.all()), nan, infinite, None


def _examine_bytes(octets: Any, _dtype: DType, _signs: bool) -> tuple[Any, ...]:
    return not octets.any(), None, None, None
