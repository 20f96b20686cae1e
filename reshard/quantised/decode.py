"""The arithmetic of dequantisation, with numpy: float32 codes times float32 scales.

Memory use is a few blocks of `_BLOCK` values for each thread, and for transposed weights (GPT-OSS)
also the codes of one matrix, up to `_KEPT` bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from reshard.chunks import Chunk
from reshard.derived import Reader
from reshard.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, UINT8, DType
from reshard.errors import CorruptError
from reshard.quantised.scaled import Scaled

Array = NDArray[Any]

E4M3, E5M2 = BY_NAME["float8_e4m3fn"], BY_NAME["float8_e5m2"]
E8M0 = BY_NAME["float8_e8m0fnu"]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 5

_BLOCK = 1 << 16  # values; a block stays in the cache
_KEPT = 16 << 20  # bytes; an expert of GPT-OSS has 8 MiB
# For each pool of open files, the matrix that a thread has read last.
_kept: WeakKeyDictionary[Reader, threading.local] = WeakKeyDictionary()


def read_values(pool: Reader, weight: Scaled, start: int, target: memoryview) -> None:
    """Fill ``target`` with float32 values of a weight from an element on.

    Raises:
        CorruptError: a scale is infinite or not a number.
        ReshardError: a file cannot be read.
    """
    out = np.frombuffer(target, np.float32)
    size = weight.rows * weight.columns
    fill = _fill_transposed if weight.transposed else _fill
    done = 0
    while done < out.size:
        matrix, at = divmod(start + done, size)
        count = min(size - at, out.size - done)
        fill(pool, weight, matrix, at, out[done : done + count])
        done += count


def decode_scales(raw: bytes, dtype: DType) -> Array:
    """Return stored scales as float32."""
    if dtype in (UINT8, E8M0):  # an exponent; 255 is NaN
        powers: Array = np.take(_powers(), np.frombuffer(raw, np.uint8))
        return powers
    if dtype == BFLOAT16:
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {FLOAT32: "<f4", FLOAT16: "<f2"}[dtype]).astype(np.float32)


@cache
def decode_table(dtype: DType) -> Array:
    """Return the 256 values of a float8 dtype as float32."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype == E5M2:  # the upper half of a float16
        return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    normal = np.ldexp(8 + mantissa, exponent.astype(np.int32) - 10)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)
    values[127] = np.nan  # e4m3fn has no infinity
    values[128:] = -values[:128]
    return values


@cache
def decode_e2m1() -> Array:
    """Return the values of the 16 codes of e2m1 as float32."""
    return np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)


@cache
def _pair_table() -> Array:
    """Return for each byte its two e2m1 values, as one element of 8 bytes."""
    values = decode_e2m1()
    codes = np.arange(256)
    return np.stack([values[codes & 15], values[codes >> 4]], axis=1).view(np.uint64).reshape(-1)


@cache
def _powers() -> Array:
    with np.errstate(over="ignore"):
        powers: Array = np.ldexp(np.float32(1), np.arange(256, dtype=np.int32) - 127)
    powers[255] = np.nan
    return powers


def _fill(pool: Reader, weight: Scaled, matrix: int, at: int, out: Array) -> None:
    """Fill ``out`` with values of a matrix from an element on."""
    done = 0
    for row, column, rows, columns in _cut(weight, at, out.size):
        piece = out[done : done + rows * columns].reshape(rows, columns)
        _decode(pool, weight, matrix, (row, column), piece)
        done += rows * columns


def _cut(weight: Scaled, at: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield pieces (row, column, rows, columns) of a run of a matrix.

    A piece is within one row of blocks, unless each row has scales of its own. A piece with several
    rows has whole rows.
    """
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


def _decode(pool: Reader, weight: Scaled, matrix: int, origin: tuple[int, int], out: Array) -> None:
    """Fill ``out`` with a block of a stored matrix, which is contiguous in the file."""
    row, column = origin
    rows, columns = out.shape
    first = (matrix * weight.rows + row) * weight.columns + column
    if weight.packed:
        low, high = first // 2, -(-(first + rows * columns) // 2)
        raw = np.frombuffer(_read(pool, weight.codes, low, high - low), np.uint8)
        values = _pair_table()[raw].view(np.float32)[first % 2 :][: rows * columns]
        out[...] = values.reshape(rows, columns)
    else:
        raw = np.frombuffer(_read(pool, weight.codes, first, rows * columns), np.uint8)
        table = decode_table(weight.codes.dtype)
        np.take(table, raw.reshape(rows, columns), out=out, mode="clip")
    scales = _read_scales(pool, weight, matrix, row, rows)
    _multiply(out, scales, weight.block[1], column)


def _multiply(values: Array, scales: Array, width: int, column: int) -> None:
    """Multiply values, from a column on, by the scales of their blocks of ``width`` columns."""
    first, last = column // width, (column + values.shape[1] - 1) // width
    wide = np.repeat(scales[:, first : last + 1], width, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= wide[:, column - first * width :][:, : values.shape[1]]


def _read(pool: Reader, chunk: Chunk, first: int, count: int) -> bytes:
    size = chunk.dtype.itemsize
    return pool.read(chunk.file, chunk.byte_offset + first * size, count * size)


def _read_scales(pool: Reader, weight: Scaled, matrix: int, row: int, rows: int) -> Array:
    """Return the scales of some rows of a matrix: one row of scales for each row of blocks.

    Raises:
        CorruptError: a scale is infinite or not a number.
    """
    high, (down, across) = weight.block[0], weight.grid
    first, last = row // high, (row + rows - 1) // high
    at = ((0 if weight.shared else matrix * down) + first) * across
    raw = _read(pool, weight.scales, at, (last - first + 1) * across)
    scales = decode_scales(raw, weight.scales.dtype)
    if not np.isfinite(scales).all():
        bad = int(np.flatnonzero(~np.isfinite(scales))[0])
        raise CorruptError(
            weight.scales.file,
            f"a scale of {weight.fqn!r} is {scales[bad]} (element {at + bad} of the scales)",
            "fetch the file again; a model with such weights computes nothing but NaN",
        )
    return scales.reshape(-1, across)


def _fill_transposed(pool: Reader, weight: Scaled, matrix: int, at: int, out: Array) -> None:
    """Fill ``out`` with values of a transposed matrix from an element on."""
    height = weight.rows  # of the stored matrix: the length of a row of the transposed one
    done = 0
    while done < out.size:
        column, row = divmod(at + done, height)
        whole = row == 0 and out.size - done >= height
        columns = (out.size - done) // height if whole else 1
        rows = height if whole else min(height - row, out.size - done)
        piece = out[done : done + rows * columns].reshape(columns, rows)
        _transpose(pool, weight, matrix, (row, column), piece)
        done += rows * columns


def _transpose(
    pool: Reader, weight: Scaled, matrix: int, origin: tuple[int, int], out: Array
) -> None:
    """Fill ``out`` with the transposed block at an origin of a stored matrix."""
    (row, column), (columns, rows), width = origin, out.shape, weight.block[1]
    first, last = column // width, -(-(column + columns) // width)
    step = max(_BLOCK // ((last - first) * width), 1)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        codes, scales = _read_rows(pool, weight, matrix, row + start, count)
        values = _pair_table()[codes[:, first * width // 2 : last * width // 2]].view(np.float32)
        blocks = values.reshape(count, last - first, width)
        with np.errstate(over="ignore"):
            blocks *= scales[:, first:last, None]
        out[:, start : start + count] = values[:, column - first * width :][:, :columns].T


def _read_rows(
    pool: Reader, weight: Scaled, matrix: int, row: int, rows: int
) -> tuple[Array, Array]:
    """Return codes and scales of rows of a matrix, and keep a small matrix for the next call."""
    width = weight.columns // 2  # bytes
    if weight.rows * width > _KEPT:
        raw = _read(pool, weight.codes, (matrix * weight.rows + row) * width, rows * width)
        codes = np.frombuffer(raw, np.uint8).reshape(rows, width)
        return codes, _read_scales(pool, weight, matrix, row, rows)
    own = _kept.setdefault(pool, threading.local())
    key = (weight, matrix)
    if getattr(own, "key", None) != key:
        raw = _read(pool, weight.codes, matrix * weight.rows * width, weight.rows * width)
        own.codes = np.frombuffer(raw, np.uint8).reshape(weight.rows, width)
        own.scales = _read_scales(pool, weight, matrix, 0, weight.rows)
        own.key = key
    return own.codes[row : row + rows], own.scales[row : row + rows]
