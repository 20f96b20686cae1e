"""The arithmetic of quantisation, with numpy: the scale of each block, and the codes of its values.

The scale of a block maps its largest absolute value to the largest code, 448 for e4m3fn. It is
``amax / 448`` in float32 (``act_quant`` in ``inference/kernel.py`` of DeepSeek V3), or the next
power of two that is not smaller (``scale_fmt`` ue8m0 of DeepSeek V3.1; ``downcast_to_mxfp_torch``
of triton_kernels for the MXFP4 experts of GPT-OSS). A code is the value divided by its scale,
rounded to nearest even.

All functions take a matrix of a weight, or a part of one that consists of whole blocks, as the
weight has it: if the codes are stored transposed (GPT-OSS), a block is a part of a column. Values
are float32, or the bits of bfloat16 (``<u2``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.core.dtypes import (
    BFLOAT16,
    E5M2,
    E8M0,
    FLOAT16,
    FLOAT32,
    UINT8,
    DType,
    round_to_bfloat16,
)
from reshard.quantised import loops
from reshard.quantised.decode import build_products, decode_scales, decode_table
from reshard.quantised.scaled import E2M1, Scaled

Array = NDArray[Any]

_POWERS = (UINT8, E8M0)  # dtypes of scales that are powers of two
_TEST_ROWS = 16


def find_largest(values: Array, weight: Scaled) -> Array:
    """Return the largest absolute value of each block; NaN if one of its values is NaN."""
    high, wide = weight.value_block
    lines = loops.find_largest(values, high)
    return _reduce_columns(np.maximum, lines, wide)


def compare(values: Array, others: Array, high: int, weight: Scaled) -> Array:
    """Return for each block whether it has the values of another, perhaps rounded to bfloat16.

    Args:
        values: `high` rows of each row of blocks.
        others: the other values, of the same shape.
        high: see above.
        weight: where codes and scales are stored, and how.
    """
    return _find_same(loops.compare(values, others, high), weight)


def compare_codes(values: Array, codes: Array, scales: Array, high: int, weight: Scaled) -> Array:
    """Return for each block whether it has the values of float8 codes, like `compare`.

    Args:
        values: the values, of rows as they are stored.
        codes: the codes, of the same shape.
        scales: the scale of each block, in float32.
        high: the rows that share a line of scales.
        weight: where codes and scales are stored, and how.
    """
    lines, table = _spread(scales, weight, values.shape[1]), decode_table(weight.code)
    compared = loops.compare_codes(values, codes, table, lines, high, weight.code)
    return _find_same(compared, weight)


def compare_columns(values: Array, codes: Array, scales: Array, weight: Scaled) -> Array:
    """Return for each block whether it has the values of transposed codes, like `compare`.

    Args:
        values: whole rows of blocks.
        codes: the transposed codes: a row of bytes for each two rows of values.
        scales: the transposed scales: a row for each row of blocks.
        weight: where codes and scales are stored, and how.
    """
    high = weight.value_block[0]
    return _find_same(loops.compare_columns(values, codes, scales, build_products(), high), weight)


def _find_same(compared: Array, weight: Scaled) -> Array:
    bits = _reduce_columns(np.bitwise_and, compared, weight.value_block[1])
    # The values of a weight in bfloat16 are exact, so none is rounded.
    accepted = 3 if weight.dtype == FLOAT32 else 1
    is_same: Array = (bits & accepted) != 0
    return is_same


def choose_scales(values: Array, amax: Array, weight: Scaled) -> Array:
    """Return the scale of each block, as the scales of a weight are stored.

    Where float32 scales and codes have these values as their products, the result is these scales:
    each is ``amax / 448`` or a neighbour of it, because the product ``448 * scale`` was rounded. If
    several of the three have these values as products, the result is the first of them.

    Args:
        values: the values; each row of blocks has the same number of rows.
        amax: the largest absolute value of each block.
        weight: where codes and scales are stored, and how.
    """
    largest = _list_magnitudes(weight.code)[-1]
    with np.errstate(under="ignore"):
        ratio: Array = amax / largest
    dtype = weight.scales.dtype
    if dtype in _POWERS:
        bits = ratio.view(np.uint32)
        bits += 0x7FFFFF  # the power of two that is not smaller has the next exponent
        bits >>= 23
        exponents = bits.astype(np.uint8)
        # A block of zeros: triton_kernels writes 2 ** -127, transformers 1.
        return exponents if weight.packed else np.where(exponents == 0, np.uint8(127), exponents)
    ratio[ratio == 0] = 1
    return _find_exact(values, weight, ratio) if dtype == FLOAT32 else _round(ratio, dtype)


def encode(values: Array, stored_scales: Array, weight: Scaled, out: Array) -> None:
    """Write the codes of values as bytes.

    Args:
        values: rows of blocks.
        stored_scales: the scale of each block, as it is stored.
        weight: where codes and scales are stored, and how.
        out: a matrix of bytes. If two codes share a byte, it has half as many columns as the
            values, or half as many rows if the codes are transposed.
    """
    high = weight.value_block[0]
    if weight.packed and weight.transposed:
        powers, magnitudes = decode_table(E8M0.name), _list_magnitudes(E2M1)
        loops.encode_pairs(values, stored_scales, powers, high, magnitudes, out)
        return
    scales = decode_stored(stored_scales, weight.scales.dtype)
    lines = _spread(np.where(scales == 0, np.float32(1), scales), weight, values.shape[1])
    codes = np.empty(values.shape, np.uint8) if weight.packed else out
    _encode(values, lines, high, weight, codes)
    if weight.packed:
        np.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=out)


def _spread(scales: Array, weight: Scaled, columns: int) -> Array:
    return loops.spread(scales, weight.value_block[1], columns)


def decode_stored(scales: Array, dtype: DType) -> Array:
    """Return stored scales as float32."""
    return decode_scales(scales.tobytes(), dtype).reshape(scales.shape)


def _reduce_columns(function: np.ufunc, lines: Array, wide: int) -> Array:
    """Reduce every ``wide`` columns to one; the last ones can be fewer."""
    if wide == 1:
        return lines
    reduced: Array = function.reduceat(lines, range(0, lines.shape[1], wide), axis=1)
    return reduced


def _encode(values: Array, lines: Array, high: int, weight: Scaled, out: Array) -> None:
    loops.encode(values, lines, high, _list_magnitudes(weight.code), weight.code, out)


def _list_magnitudes(code: str) -> Array:
    return decode_table(code)[: {E2M1: 8, E5M2.name: 124}.get(code, 127)]


def _round(scales: Array, dtype: DType) -> Array:
    if dtype == FLOAT16:
        return scales.astype("<f2")
    if dtype != BFLOAT16:
        raise AssertionError(dtype)
    rounded: Array = round_to_bfloat16(scales.view(np.uint32)).astype("<u2")
    return rounded


def _find_exact(values: Array, weight: Scaled, ratio: Array) -> Array:
    # Rows are tried until at most one scale is left for each block. In blocks that are not products
    # of codes, none is left after the first row.
    above, below = np.nextafter(ratio, np.float32(np.inf)), np.nextafter(ratio, np.float32(0))
    near = np.stack([ratio, above, below])
    is_left = np.ones(near.shape, bool)
    rows = values.reshape(len(ratio), -1, values.shape[1])
    start, stop = 0, 1
    while start < rows.shape[1] and is_left.sum(axis=0).max() > 1:
        is_left &= _give_values(rows[:, start:stop], near, weight)
        start, stop = stop, stop + _TEST_ROWS
    chosen: Array = np.where(is_left.any(axis=0), np.choose(is_left.argmax(axis=0), near), ratio)
    return chosen


def _give_values(rows: Array, scales: Array, weight: Scaled) -> Array:
    """Return whether codes times a scale give the values of some rows, for several scales."""
    high, columns, wide = *rows.shape[1:], weight.value_block[1]
    repeated = np.tile(rows.reshape(-1, columns), (len(scales), 1))
    lines = _spread(scales.reshape(-1, scales.shape[-1]), weight, columns)
    codes = np.empty(repeated.shape, np.uint8)
    _encode(repeated, lines, high, weight, codes)
    table = decode_table(weight.code)
    compared = loops.compare_codes(repeated, codes, table, lines, high, weight.code)
    bits = _reduce_columns(np.bitwise_and, compared, wide)
    is_equal: Array = (bits & 1) != 0
    return is_equal.reshape(scales.shape)
