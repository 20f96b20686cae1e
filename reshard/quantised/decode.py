"""The arithmetic of dequantisation, with numpy: float32 codes times float32 scales.

Products of e2m1 codes and powers of two are exact in bfloat16, which transposed weights have.

Memory use is a few blocks of `_BLOCK` values for each thread, and for transposed weights (GPT-OSS)
also the codes of one matrix, up to `_KEPT` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.core.dtypes import BFLOAT16, E4M3, E5M2, E8M0, FLOAT16, FLOAT32, UINT8, DType
from reshard.engine.move.tiles import find_reader
from reshard.errors import CorruptError
from reshard.quantised import loops
from reshard.quantised.scaled import BITS, E2M1, INT4, INT8, Scaled
from reshard.system.derived import Reader

Array = NDArray[Any]

# Mantissa bits and exponent bias (torch 2.13 ``torch/headeronly/util/Float8_*.h``).
_FLOAT8 = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 5

NAN_EXPONENT = 255
"""A scale that is stored as an exponent of two and is not a number."""
_BLOCK = 1 << 18  # values; a block stays in the cache
_STRIP_BLOCKS = 4  # of 32 columns, whose codes fill a line of the cache
_KEPT = 16 << 20  # bytes; an expert of GPT-OSS has 8 MiB


def read_values(pool: Reader, weight: Scaled, start: int, target: memoryview) -> None:
    """Fill ``target`` with values of a weight, in its `Scaled.dtype`, from an element on."""
    _read(pool, weight, start, np.frombuffer(target, "<u2" if weight.dtype == BFLOAT16 else "<f4"))


def read_rounded(pool: Reader, weight: Scaled, start: int, target: memoryview) -> int | None:
    """Fill ``target`` with values of a weight in bfloat16, from an element on.

    Returns:
        The number of finite values that became infinite; None if this takes two passes.
    """
    if weight.transposed or not loops.can_round():
        return None
    return _read(pool, weight, start, np.frombuffer(target, "<u2"))


def _read(pool: Reader, weight: Scaled, start: int, out: Array) -> int:
    """Fill ``out`` from an element on; return how many finite values became infinite."""
    size = weight.rows * weight.columns
    fill = _fill_transposed if weight.transposed else _fill
    done = overflowed = 0
    while done < out.size:
        matrix, at = divmod(start + done, size)
        count = min(size - at, out.size - done)
        overflowed += fill(pool, weight, matrix, at, out[done : done + count])
        done += count
    return overflowed


def decode_scales(raw: bytes | bytearray, dtype: DType) -> Array:
    """Return stored scales as float32."""
    if dtype in (UINT8, E8M0):  # an exponent of two
        powers: Array = np.take(_list_powers(), np.frombuffer(raw, np.uint8))
        return powers
    if dtype == E4M3:
        values: Array = np.take(decode_table(dtype.name), np.frombuffer(raw, np.uint8))
        return values
    if dtype == BFLOAT16:
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {FLOAT32: "<f4", FLOAT16: "<f2"}[dtype]).astype(np.float32)


@cache
def decode_table(code: str) -> Array:
    """Return the value of each byte of a code (`Scaled.code`) as float32; 4 bits are repeated."""
    if code == E8M0.name:
        return _list_powers()
    if code == E2M1:
        return np.resize(decode_e2m1(), 256)
    if code not in _FLOAT8:
        first = {INT4: -8, INT8: -128, "int8": 0}[code]
        integers = np.arange(first, first + (16 if code == INT4 else 256))
        return np.resize(integers.astype(np.int8).astype(np.float32), 256)
    mantissa_bits, bias = _FLOAT8[code]
    codes = np.arange(128, dtype=np.int32)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    scale = np.maximum(exponent, 1) - bias - mantissa_bits
    half = np.ldexp(significand.astype(np.float32), scale)
    if code == E5M2.name:
        half[124:] = np.inf, np.nan, np.nan, np.nan
    elif code == E4M3.name:
        half[127] = np.nan  # e4m3fn has no infinity
    values = np.concatenate([half, -half])
    if code.endswith("fnuz"):
        values[128] = np.nan  # the only NaN, in the place of -0
    return values


@cache
def decode_e2m1() -> Array:
    """Return the values of the 16 codes of e2m1 as float32."""
    return np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)


@cache
def _list_powers() -> Array:
    with np.errstate(over="ignore"):
        powers: Array = np.ldexp(np.float32(1), np.arange(256, dtype=np.int32) - 127)
    powers[NAN_EXPONENT] = np.nan
    return powers


def _fill(pool: Reader, weight: Scaled, matrix: int, at: int, out: Array) -> int:
    """Fill ``out`` with values of a matrix from an element on, like `_read`."""
    done = overflowed = 0
    for row, column, rows, columns in _cut(weight, at, out.size):
        piece = out[done : done + rows * columns].reshape(rows, columns)
        overflowed += _decode(pool, weight, matrix, (row, column), piece)
        done += rows * columns
    return overflowed


def _cut(weight: Scaled, at: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    # A piece is within one row of blocks, unless each row has scales of its own. A piece with
    # several rows has whole rows.
    width, high = weight.columns, weight.block[0]
    stop = at + count
    while at < stop:
        row, column = divmod(at, width)
        if column or stop - at < width:
            columns = min(width - column, stop - at, _BLOCK)
            yield row, column, 1, columns
            at += columns
            continue
        rows = min((stop - at) // width, max(_BLOCK // width, 1))
        if high > 1:
            rows = min(rows, high - row % high)
        yield row, 0, rows, width
        at += rows * width


def _decode(pool: Reader, weight: Scaled, matrix: int, origin: tuple[int, int], out: Array) -> int:
    row, column = origin
    rows, columns = out.shape
    first = (matrix * weight.rows + row) * weight.columns + column
    start, stop, code = first, first + rows * columns, weight.code
    scales, wide = _take_scales(pool, weight, matrix, origin, out.shape)
    zeros = _read_zeros(pool, weight, matrix, row, rows)
    if zeros is not None:
        zeros, _ = _cut_columns(zeros, weight.block[1], column, columns)
    if weight.packed:
        start, stop = start // 2, -(-stop // 2)
    codes = _read_codes(pool, "codes of a block", weight, start, stop - start)
    if weight.packed and first % 2:
        codes, code = loops.unpack(codes)[1 : 1 + rows * columns], ""
    block = rows // len(scales), wide
    return loops.decode(codes, decode_table(weight.code), code, scales, block, out, zeros)


def _read_zeros(pool: Reader, weight: Scaled, matrix: int, row: int, rows: int) -> Array | None:
    """Return what is subtracted from the codes of some rows of a matrix, by block; or None."""
    stored = weight.zeros
    if stored is None:
        return None
    bits, across = BITS[weight.code], weight.grid[1]
    per_word = 32 // bits
    first, last = row // per_word, (row + rows - 1) // per_word
    at = (matrix * -(-weight.rows // per_word) + first) * across * 4
    raw = pool.read(stored.file, stored.byte_offset + at, (last - first + 1) * across * 4)
    words = np.frombuffer(raw, "<u4").reshape(-1, 1, across)
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(-1, 1)
    integers = (words >> shifts & ((1 << bits) - 1)).reshape(-1, across).astype(np.float32)
    skipped = row - first * per_word
    zeros: Array = integers[skipped : skipped + rows] - np.float32(1 << (bits - 1))
    return zeros


def _take_scales(
    pool: Reader, weight: Scaled, matrix: int, origin: tuple[int, int], shape: tuple[int, ...]
) -> tuple[Array, int]:
    # If a row of scales is that of several rows, those of many rows are read together, spread over
    # the columns, and kept.
    (row, column), (rows, columns) = origin, shape
    high, width = weight.block
    step = _BLOCK // weight.columns * high
    if high == 1 or not step:
        scales = _read_scales(pool, weight, matrix, row, rows)
        return _cut_columns(scales, width, column, columns)
    start = row - row % step

    def read_lines() -> Array:
        scales = _read_scales(pool, weight, matrix, start, min(step, weight.rows - start))
        return loops.spread(scales, width, weight.columns)

    lines = find_reader(pool).keep("lines of scales", (weight, matrix, start), read_lines)
    line = (row - start) // high
    return np.ascontiguousarray(lines[line : line + 1, column : column + columns]), 1


def _cut_columns(numbers: Array, width: int, column: int, columns: int) -> tuple[Array, int]:
    if column % width:
        return loops.spread(numbers, width, columns, column), 1
    return np.ascontiguousarray(
        numbers[:, column // width : -(-(column + columns) // width)]
    ), width


def _read_codes(pool: Reader, slot: str, weight: Scaled, first: int, count: int) -> Array:
    """Return bytes of codes, in memory that the thread's reader keeps for the next ones."""
    codes = find_reader(pool).keep(slot, count, lambda: np.empty(count, np.uint8))
    pool.read_into(weight.codes.file, weight.codes.byte_offset + first, codes.data)
    return codes


def _read_scales(pool: Reader, weight: Scaled, matrix: int, row: int, rows: int) -> Array:
    """Return the scales of some rows of a matrix: one row of scales for each row of blocks."""
    at, raw = _read_stored_scales(pool, weight, matrix, row, rows)
    scales = decode_scales(raw, weight.scales.dtype)
    if weight.factor != 1:
        scales *= np.float32(weight.factor)
    if weight.divisor != 1:
        scales /= np.float32(weight.divisor)
    check_scales(weight, scales, at)
    return scales.reshape(-1, weight.grid[1])


def check_scales(weight: Scaled, scales: Array, at: int) -> None:
    """Check that scales of a weight are finite.

    Args:
        weight: the weight.
        scales: the scales, in float32, in one dimension.
        at: the number of the first of them among the stored scales.

    Raises:
        CorruptError: a scale is infinite or not a number.
    """
    if not np.isfinite(scales).all():
        bad = int(np.flatnonzero(~np.isfinite(scales))[0])
        raise _explain_scale(weight, scales[bad], at + bad)


def _read_exponents(pool: Reader, weight: Scaled, matrix: int, row: int, rows: int) -> Array:
    """Return the scales of some rows as they are stored, if these are exponents of two."""
    _, raw = _read_stored_scales(pool, weight, matrix, row, rows)
    exponents = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    check_exponents(weight, exponents, matrix, row)
    return exponents


def check_exponents(weight: Scaled, exponents: Array, matrix: int, row: int) -> None:
    """Check that scales that are stored as exponents of two are numbers.

    Args:
        weight: the weight, in which each row has scales of its own.
        exponents: the scales of some rows.
        matrix: the number of the matrix.
        row: the first row.

    Raises:
        CorruptError: a scale is not a number.
    """
    bad = exponents.reshape(-1) == NAN_EXPONENT
    if bad.any():
        at = (matrix * weight.rows + row) * weight.grid[1] + int(bad.argmax())
        raise _explain_scale(weight, np.nan, at)


def _read_stored_scales(
    pool: Reader, weight: Scaled, matrix: int, row: int, rows: int
) -> tuple[int, bytes | bytearray]:
    high, (down, across) = weight.block[0], weight.grid
    first, last = row // high, (row + rows - 1) // high
    at = ((0 if weight.shared else matrix * down) + first) * across
    size, stored = weight.scales.dtype.itemsize, weight.scales
    nbytes = (last - first + 1) * across * size
    return at, pool.read(stored.file, stored.byte_offset + at * size, nbytes)


def _explain_scale(weight: Scaled, value: float, at: int) -> CorruptError:
    return CorruptError(
        weight.scales.file,
        f"a scale of {weight.fqn!r} is {value} (element {at} of the scales)",
        "fetch the file again; a model with such weights computes nothing but NaN",
    )


def _fill_transposed(pool: Reader, weight: Scaled, matrix: int, at: int, out: Array) -> int:
    height = weight.rows  # the length of a row of the transposed matrix
    done = 0
    while done < out.size:
        column, row = divmod(at + done, height)
        whole = row == 0 and out.size - done >= height
        columns = (out.size - done) // height if whole else 1
        rows = height if whole else min(height - row, out.size - done)
        piece = out[done : done + rows * columns].reshape(columns, rows)
        _transpose(pool, weight, matrix, (row, column), piece)
        done += rows * columns
    return 0


def _transpose(
    pool: Reader, weight: Scaled, matrix: int, origin: tuple[int, int], out: Array
) -> None:
    # Bytes are transposed instead of values, which have eight times their size.
    (row, column), (columns, rows) = origin, out.shape
    step, wide = _count_kept_rows(weight), weight.block[1] * _STRIP_BLOCKS
    for start in range(row - row % step, row + rows, step):
        for first in range(column - column % wide, column + columns, wide):
            codes, scales = _take_strip(pool, weight, matrix, start, first)
            inside = max(row - start, 0), max(column - first, 0)
            piece = out[max(first - column, 0) : first + wide - column]
            loops.decode_columns(
                codes, scales, build_products(), inside, max(start - row, 0), piece
            )


@cache
def build_products() -> Array:
    """Return the bfloat16 of each pair of a scale and an e2m1 code: 256 rows of 16."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        products = _list_powers()[:, None] * decode_e2m1()
    values: Array = (products.view(np.uint32) >> 16).astype("<u2")
    return values


def _count_kept_rows(weight: Scaled) -> int:
    return max(min(weight.rows, 2 * _KEPT // weight.columns), 1)


def _take_strip(
    pool: Reader, weight: Scaled, matrix: int, row: int, column: int
) -> tuple[Array, Array]:
    """Return the transposed codes and scales of a strip of columns; the reader keeps them."""
    reader, key, width = find_reader(pool), (weight, matrix, row), weight.block[1]

    def read_rows() -> tuple[Array, Array]:
        rows, nbytes = min(_count_kept_rows(weight), weight.rows - row), weight.row_nbytes
        first = (matrix * weight.rows + row) * nbytes
        codes = _read_codes(pool, "codes of rows", weight, first, rows * nbytes)
        exponents = _read_exponents(pool, weight, matrix, row, rows)
        return codes.reshape(rows, nbytes), loops.transpose(exponents)

    def transpose() -> Array:
        return loops.transpose(codes, column // 2, width * _STRIP_BLOCKS // 2)

    codes, scales = reader.keep("rows", key, read_rows)
    strip = reader.keep("strip", (key, column), transpose)
    line = column // width
    return strip, scales[line : line + _STRIP_BLOCKS]
