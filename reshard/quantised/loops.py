"""The loops over values: by the compiled module ``_codes``, if this installation has it, or numpy.

Both give the same bits. Matrices are contiguous; values are float32, or the bits of bfloat16
(``<u2``), which need no copy in float32. ``lines`` have one row for each `high` rows of a
matrix (the last can be fewer) and an element for each column.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.core.dtypes import round_to_bfloat16
from reshard.quantised.scaled import E2M1, INT4
from reshard.system.compiled import find_compiled

Array = NDArray[Any]


_compiled = find_compiled("reshard.quantised._codes")


def can_round() -> bool:
    """Return whether `decode` can round to bfloat16: numpy would need as many passes as a cast."""
    return _compiled is not None


def decode(
    codes: Array,
    table: Array,
    code: str,
    scales: Array,
    block: tuple[int, int],
    out: Array,
    zeros: Array | None = None,
) -> int:
    """Write the products of codes and scales; return how many finite ones became infinite.

    Args:
        codes: the bytes of a matrix, row-major.
        table: the value of each byte, in float32.
        code: what the codes are (`Scaled.code`); any other name if each is a byte.
        scales: a row for each row of blocks, in float32.
        block: the rows and columns that share a scale, counted from the first ones.
        out: the matrix of values in float32 or, if `can_round`, of the bits of bfloat16.
        zeros: what is subtracted from the codes, in float32, like the scales.
    """
    (high, wide), columns = block, out.shape[1]
    if _compiled is not None:
        subtracted = b"" if zeros is None else zeros
        overflowed: int = _compiled.decode(
            codes, table, subtracted, scales, out, out.itemsize, columns, high, wide, code
        )
        return overflowed
    if code in (E2M1, INT4):
        codes = unpack(codes)[: out.size]
    np.take(table, codes.reshape(out.shape), out=out, mode="clip")
    if zeros is not None:
        out -= _repeat(spread(zeros, wide, columns), high, len(out))
    with np.errstate(over="ignore", invalid="ignore"):
        out *= _repeat(spread(scales, wide, columns), high, len(out))
    return 0


def unpack(pairs: Array) -> Array:
    """Return codes of 4 bits, of which a byte has two, as bytes."""
    codes: Array = _build_byte_table()[pairs].view(np.uint8)
    return codes


def encode(
    values: Array, lines: Array, high: int, magnitudes: Array, dtype: str, out: Array
) -> None:
    """Write the nearest codes of values divided by scales, ties to even; NaN as the largest.

    Args:
        values: a matrix.
        lines: the scales, in float32; not 0.
        high: the rows that share a line.
        magnitudes: the finite values of the codes without a sign, in their order.
        dtype: the name of the codes' dtype; "e2m1" for those of 4 bits.
        out: a matrix of bytes of the same shape.
    """
    if _compiled is not None and values.size:
        _compiled.encode(values, values.itemsize, lines, out, values.shape[1], high, dtype)
        return
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        scaled = widen(values) / _repeat(lines, high, len(values))
    table = _build_encode_table(tuple(magnitudes.tolist()))
    table.take(_round_to_odd(scaled), mode="clip", out=out)


def encode_pairs(
    values: Array, exponents: Array, powers: Array, high: int, magnitudes: Array, out: Array
) -> None:
    """Write the codes of `encode` to "e2m1", two in each byte: those of a row and of the next one.

    Args:
        values: a matrix with an even number of rows.
        exponents: the scales: lines of bytes that are exponents of two.
        powers: the scale that each byte stands for, in float32.
        high: the rows that share a line; an even number.
        magnitudes: as for `encode`.
        out: a matrix of bytes with half as many rows.
    """
    if _compiled is not None and values.size:
        _compiled.encode_pairs(values, values.itemsize, exponents, out, values.shape[1], high)
        return
    codes = np.empty(values.shape, np.uint8)
    encode(values, powers[exponents], high, magnitudes, "e2m1", codes)
    np.bitwise_or(codes[::2], codes[1::2] << 4, out=out)


def find_largest(values: Array, high: int) -> Array:
    """Return lines of the largest absolute values; NaN if one of the values is NaN."""
    lines = np.empty((-(-len(values) // high), values.shape[1]), np.float32)
    if _compiled is not None and values.size:
        _compiled.find_largest(values, values.itemsize, lines, values.shape[1], high)
    else:
        _reduce_rows(np.maximum, np.abs(widen(values)), high, lines)
    return lines


def compare(values: Array, others: Array, high: int) -> Array:
    """Return lines of bits that compare two matrices.

    Bit 0 is set if all values of the rows have the same bits, bit 1 if the values have the bits of
    the others after rounding these to bfloat16.
    """
    lines = np.empty((-(-len(values) // high), values.shape[1]), np.uint32)
    if _compiled is not None and values.size:
        sizes = values.itemsize, others.itemsize
        _compiled.compare(values, sizes[0], others, sizes[1], lines, values.shape[1], high)
        return lines
    mine, bits = widen(values).view(np.uint32), widen(others).view(np.uint32)
    rounded = round_to_bfloat16(bits) << 16
    rounded[np.isnan(bits.view(np.float32))] = 0x7FC00000
    equal = (mine == bits) | ((mine == rounded).astype(np.uint32) << 1)
    _reduce_rows(np.bitwise_and, equal, high, lines)
    return lines


def compare_codes(
    values: Array, codes: Array, table: Array, scales: Array, high: int, dtype: str
) -> Array:
    """Return lines of bits that compare values with the products of codes and scales.

    The bits are those of `compare`; the other arguments are those of `decode`, with the scales as
    its lines.
    """
    if _compiled is not None and codes.size:
        lines = np.empty(scales.shape, np.uint32)
        _compiled.compare_codes(
            values, values.itemsize, codes, table, scales, lines, codes.shape[1], high, dtype
        )
        return lines
    products = np.empty(codes.shape, np.float32)
    decode(codes, table, "", scales, (high, 1), products)
    return compare(values, products, high)


def compare_columns(values: Array, codes: Array, scales: Array, table: Array, high: int) -> Array:
    """Return lines of bits that compare values with the products of transposed codes and scales.

    The bits are those of `compare`; the other arguments are those of `decode_columns`, with a row
    of scales for each ``high`` rows of values.
    """
    if _compiled is not None and values.size:
        lines = np.empty(scales.shape, np.uint32)
        _compiled.compare_columns(
            values, values.itemsize, codes, scales, lines, values.shape[1], high
        )
        return lines
    products = np.empty(values.shape, "<u2")
    decode_columns(codes, scales, table, (0, 0), 0, products)
    return compare(values, products, high)


def transpose(matrix: Array, first: int = 0, count: int | None = None) -> Array:
    """Return the transposed matrix of some columns of a matrix of bytes.

    Args:
        matrix: a contiguous matrix.
        first: the first column.
        count: the number of columns, if there are so many; None: all.
    """
    rows, columns = matrix.shape
    out = np.empty((min(columns - first, columns if count is None else count), rows), np.uint8)
    transpose_into(out, 0, matrix, first)
    return out


def transpose_into(out: Array, at: int, matrix: Array, first: int = 0) -> None:
    """Write columns of a matrix of bytes into the rows of ``out``.

    Args:
        out: a matrix with as many rows as columns are taken.
        at: the element of each row to start at.
        matrix: a contiguous matrix.
        first: the first column that is taken.
    """
    if _compiled is not None and matrix.size:
        _compiled.transpose(matrix, matrix.shape[1], first, out, out.shape[1], at)
    else:
        out[:, at : at + len(matrix)] = matrix[:, first : first + len(out)].T


def decode_columns(
    codes: Array, scales: Array, table: Array, origin: tuple[int, int], at: int, out: Array
) -> None:
    """Write the transposed block at an origin of a matrix of codes of 4 bits.

    Args:
        codes: the transposed bytes of the matrix: a row for each two columns.
        scales: the transposed scales, one byte each: a row for each block of columns.
        table: the values in 16 bits by scale and code: 256 rows of 16.
        origin: the first row and column of the matrix.
        at: the element of each row of ``out`` to start at.
        out: a row for each column of the block; rows end where the codes end.
    """
    (row, column), (columns, width), height = origin, out.shape, codes.shape[1]
    group = 2 * len(codes) // len(scales)
    if _compiled is not None:
        _compiled.decode_columns(codes, scales, out, height, row, column, columns, at, group)
        return
    count = min(height - row, width - at)
    inside, into = slice(row, row + count), slice(at, at + count)
    for number in range(columns):
        byte, half = divmod(column + number, 2)
        # A code and its scale are looked up together: a byte and a scale have 65,536 pairs.
        pairs = scales[2 * byte // group, inside].astype(np.uint16) << 8 | codes[byte, inside]
        _build_pair_table(table.tobytes(), half).take(pairs, out=out[number, into], mode="clip")


def widen(values: Array) -> Array:
    """Return values as float32."""
    return values if values.itemsize == 4 else (values.astype(np.uint32) << 16).view(np.float32)


def _repeat(lines: Array, high: int, rows: int) -> Array:
    return lines if high == 1 or len(lines) == 1 else np.repeat(lines, high, axis=0)[:rows]


def spread(numbers: Array, wide: int, columns: int, first: int = 0) -> Array:
    """Return the number of each column, from the first one on; each stands for ``wide`` columns."""
    if wide == 1:
        return np.ascontiguousarray(numbers[:, first : first + columns])
    start = first // wide
    repeated = np.repeat(numbers[:, start : -(-(first + columns) // wide)], wide, axis=1)
    return np.ascontiguousarray(repeated[:, first - start * wide :][:, :columns])


def _reduce_rows(function: np.ufunc, values: Array, high: int, lines: Array) -> None:
    """Reduce every ``high`` rows to one; the last ones can be fewer."""
    function.reduceat(values, range(0, len(values), high), axis=0, out=lines)


@cache
def _build_byte_table() -> Array:
    pairs = np.arange(256)
    return np.stack([pairs & 15, pairs >> 4], axis=1).astype(np.uint8).view(np.uint16).reshape(-1)


@cache
def _build_pair_table(table: bytes, half: int) -> Array:
    """Return the value of each pair of a scale (upper byte) and a byte of two codes.

    Args:
        table: the values by scale and code.
        half: 0 for the code in the lower bits, 1 for the other.
    """
    codes = np.arange(256) >> 4 if half else np.arange(256) & 15
    values: Array = np.frombuffer(table, "<u2").reshape(256, 16)[:, codes].reshape(-1)
    return values


@cache
def _build_encode_table(magnitudes: tuple[float, ...]) -> Array:
    """Return the code of each upper half of a float32 whose lower half was rounded to odd."""
    numbers = np.array(magnitudes, np.float64)
    halves = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # NaN
        values = np.abs((halves << 16).view(np.float32)).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    below = np.searchsorted(middles, values, "left")
    above = np.searchsorted(middles, values, "right")
    codes = np.where(below % 2 == 0, below, above)  # a value in the middle has the even code
    sign = 8 if len(numbers) == 8 else 128
    return (codes | np.where(halves >> 15, sign, 0)).astype(np.uint8)


def _round_to_odd(values: Array) -> Array:
    """Return the upper halves of float32 values; the last bit is set if the lower half is not 0.

    A code has at least two bits less, so rounding these to a code gives the code of the whole value
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    halves = values.view("<u2").reshape(*values.shape, 2)
    odd: Array = halves[..., 1] | (halves[..., 0] != 0)
    return odd
