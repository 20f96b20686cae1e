"""What the elements of a tensor are: finite, negative, all zero. Told block by block.

Blocks stay in the cache between the passes; a block without anything strange costs two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.dtypes import BFLOAT16, FLOAT16, DType

_BLOCK = 1 << 18  # elements
_INFINITY = {BFLOAT16: 0x7F80, FLOAT16: 0x7C00}  # the bits; what lies above is NaN
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
class Facts:
    """What was seen of a tensor, or of a block of it.

    Args:
        nan, infinite, negative: how many elements; -0 is not negative.
        first_strange: the flat index of the first that is NaN or infinite.
        first_negative: of the first negative one.
        is_zero: whether every element is zero.
    """

    nan: int = 0
    infinite: int = 0
    negative: int = 0
    first_strange: int | None = None
    first_negative: int | None = None
    is_zero: bool = True

    def add(self, other: Facts) -> None:
        """Take over what another block of the same tensor has."""
        self.nan += other.nan
        self.infinite += other.infinite
        self.negative += other.negative
        self.is_zero = self.is_zero and other.is_zero
        self.first_strange = _earlier(self.first_strange, other.first_strange)
        self.first_negative = _earlier(self.first_negative, other.first_negative)


def _earlier(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def look(block: bytearray, dtype: DType, start: int, *, signs: bool) -> Facts:
    """What the elements of a block are.

    Args:
        block: contiguous elements.
        start: the flat index of the first.
        signs: whether negative elements are counted.
    """
    import numpy as np

    from reshard.move import cast

    step: str
    see: Callable[[Any, DType, bool], tuple[Any, ...]]
    if dtype in _INFINITY:
        step, see = "<u2", _see_half
    elif dtype.family == "float":
        step, see = cast.numpy_dtype(dtype, casting=True), _see_float
    elif dtype.family == "complex":
        step, see = f"<f{dtype.itemsize // 2}", _see_float
    else:
        step, see = "u1", _see_float8 if dtype.family == "float8" else _see_bits
    parts = 2 if dtype.family == "complex" else 1
    parts = dtype.itemsize if see is _see_bits else parts
    held: Any = np.frombuffer(block, step)
    found = Facts()
    with np.errstate(all="ignore"):
        for at in range(0, held.size, _BLOCK):
            seen = _Seen(*see(held[at : at + _BLOCK], dtype, signs))
            found.add(seen.facts(start, at, parts))
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """Masks of the elements of one kind, where there are any."""

    is_zero: bool
    nan: Any = None
    infinite: Any = None
    negative: Any = None

    def facts(self, start: int, at: int, parts: int) -> Facts:
        """As facts; a complex element has two parts."""
        strange = _first(self.nan), _first(self.infinite)
        places = [start + (at + place) // parts for place in strange if place is not None]
        negative = _first(self.negative)
        return Facts(
            nan=_count(self.nan),
            infinite=_count(self.infinite),
            negative=_count(self.negative),
            first_strange=min(places, default=None),
            first_negative=None if negative is None else start + (at + negative) // parts,
            is_zero=self.is_zero,
        )


def _count(mask: Any) -> int:
    return 0 if mask is None else int(mask.sum())


def _first(mask: Any) -> int | None:
    return int(mask.argmax()) if mask is not None and mask.any() else None


def _see_float(values: Any, _dtype: DType, signs: bool) -> tuple[Any, ...]:
    import numpy as np

    low, high = values.min(), values.max()  # NaN if there is one
    negative = values < 0 if signs and not low >= 0 else None
    if np.isfinite(low) and np.isfinite(high):
        return bool(low == high == 0), None, None, negative
    return False, np.isnan(values), np.isinf(values), negative


def _see_half(bits: Any, dtype: DType, signs: bool) -> tuple[Any, ...]:
    magnitude = bits & 0x7FFF
    largest, infinity = magnitude.max(), _INFINITY[dtype]
    nan = magnitude > infinity if largest > infinity else None
    infinite = magnitude == infinity if largest >= infinity else None
    negative = (bits > 0x8000) & (magnitude <= infinity) if signs else None
    return bool(largest == 0), nan, infinite, negative


def _see_float8(bits: Any, dtype: DType, _signs: bool) -> tuple[Any, ...]:
    import numpy as np

    infinity, is_nan = _FLOAT8[dtype.name]
    nan = np.array([is_nan(number) for number in range(256)])[bits]
    infinite = bits & 0x7F == infinity if infinity is not None else None
    zero = (bits & 0x7F == 0) & ~nan & (dtype.name != _WITHOUT_ZERO)
    return bool(zero.all()), nan, infinite, None


def _see_bits(octets: Any, _dtype: DType, _signs: bool) -> tuple[Any, ...]:
    return (not octets.any(),)
