"""Casts of strided blocks in memory, compiled or with numpy, without torch.

A cast rounds to nearest even, like ``torch.Tensor.to``, which converts float64 to 16 bits by way of
float32. A NaN becomes bfloat16's 0x7FC0 (the bits that torch writes depend on the vector unit).
numpy has no bfloat16, so this module computes its bits, in blocks that stay in the cache. Where the
compiled module exists (`compiled`), it does the usual casts, with the same bits and counts.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from reshard.engine.move import compiled
from reshard.errors import UnsupportedError

_BLOCK = 1 << 18  # elements; with shorter blocks, calls and waits for the GIL dominate
_NUMPY = {FLOAT64: "<f8", FLOAT32: "<f4", FLOAT16: "<f2", BFLOAT16: "<u2"}
# numpy has no integer of 16 bytes; a complex128 is copied bit for bit as well.
_BITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_EXPONENT_BITS = {FLOAT64: 11, FLOAT32: 8, BFLOAT16: 8, FLOAT16: 5}
_MAX_FINITE = {FLOAT16: 65504.0, BFLOAT16: 3.3895313892515355e38, FLOAT32: 3.4028234663852886e38}
_NAN_BFLOAT16 = 0x7FC0  # torch 2.13 torch/headeronly/util/BFloat16.h, round_to_nearest_even

Array = NDArray[Any]


def get_numpy_dtype(dtype: DType, *, casting: bool) -> str:
    """Return the numpy dtype for elements of `dtype`: numbers for a cast, plain bits for a copy.

    Raises:
        UnsupportedError: elements of this dtype cannot be cast.
    """
    if not casting:
        return _BITS[dtype.itemsize]
    if dtype not in _NUMPY:
        raise UnsupportedError(
            str(dtype), "cannot be cast", "keep its dtype, or exclude the tensor"
        )
    return _NUMPY[dtype]


def cast(
    source: Array,
    target: Array,
    dtype: DType,
    target_dtype: DType,
    *,
    clamp: bool,
    factor: float = 1.0,
) -> tuple[int, int]:
    """Fill ``target`` with the values of ``source`` in another float dtype.

    Args:
        source: an array in the numpy dtype of ``dtype`` (`get_numpy_dtype`); bfloat16 as uint16.
        target: an array of the same shape in the numpy dtype of ``target_dtype``.
        dtype: the dtype of the source.
        target_dtype: the dtype of the target.
        factor: the number by which values are multiplied before rounding.
        clamp: whether to write the largest finite value where the result would be infinite.

    Returns:
        The number of finite elements that became infinite (or would have, without clamping), and
        the number of nonzero elements that became zero. The second is counted only if the target
        has fewer exponent bits. From float32 to bfloat16, only subnormals below 1e-38 can become
        zero; they are not counted.
    """
    # The loops below take contiguous lines. Strided blocks pass through contiguous arrays.
    if not (source.ndim == 1 and source.flags.c_contiguous and target.flags.c_contiguous):
        flat = np.empty(source.size, target.dtype)
        line = np.ascontiguousarray(source).reshape(-1)
        counts = cast(line, flat, dtype, target_dtype, clamp=clamp, factor=factor)
        target[...] = flat.reshape(source.shape)
        return counts
    if factor == 1.0:
        done = compiled.cast(source.data, target.data, dtype, target_dtype, clamp=clamp)
        if done is not None:
            return done
    if dtype == BFLOAT16 and target_dtype == FLOAT32 and factor == 1.0:
        _widen_bfloat16(source, target)
        return 0, 0
    overflowed = flushed = 0
    with np.errstate(all="ignore"):
        for start in range(0, source.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            numbers, computed = as_numbers(source[block], dtype), dtype
            if factor != 1.0:
                # The product has at least float32, so that the cast to
                # the target is the only rounding to 16 bits.
                wide = numbers.astype(np.float32) if dtype.itemsize < FLOAT32.itemsize else numbers
                numbers = wide * wide.dtype.type(factor)
                computed = FLOAT64 if dtype == FLOAT64 else FLOAT32
            counts = _cast_block(numbers, target[block], computed, target_dtype, clamp)
            overflowed += counts[0]
            flushed += counts[1]
    return overflowed, flushed


def _cast_block(
    numbers: Array, target: Array, dtype: DType, target_dtype: DType, clamp: bool
) -> tuple[int, int]:
    narrower = _EXPONENT_BITS[target_dtype] < _EXPONENT_BITS[dtype]
    if target_dtype == BFLOAT16:
        special = _to_bfloat16(numbers.astype(np.float32, copy=False), target)
    else:
        via_float32 = target_dtype == FLOAT16 and dtype == FLOAT64  # as torch does
        target[...] = numbers.astype(np.float32) if via_float32 else numbers
        special = narrower and _has_special(target)
    if special:
        overflowed, flushed = _fix_special_values(numbers, target, target_dtype, clamp)
        return overflowed, flushed if narrower else 0
    if narrower:
        # No cast makes a zero nonzero, so the difference of two counts is the number of new zeros.
        return 0, int(np.count_nonzero(numbers != 0)) - _count_nonzeros(target)
    return 0, 0


def _has_special(target: Array) -> bool:
    """Return whether an array has an infinity or a NaN; comparing the bits is fastest in numpy."""
    bits = target.view(_BITS[target.itemsize])
    sign = 1 << (8 * target.itemsize - 1)
    infinity = int(np.asarray(np.inf, target.dtype).view(bits.dtype))
    # As signed integers, +inf and positive NaNs are the largest; as
    # unsigned ones, -inf and the others.
    signed = bits.view(f"<i{target.itemsize}")
    return bool(signed.max(initial=0) >= infinity or bits.max(initial=0) >= sign | infinity)


def _count_nonzeros(target: Array) -> int:
    bits = target.view(_BITS[target.itemsize])
    return int(np.count_nonzero(bits << 1))  # the shift drops the sign bit


def _widen_bfloat16(source: Array, target: Array) -> None:
    """Write bfloat16 bits as float32 in place: a temporary array costs ten times as much."""
    bits = target.view(np.uint32)
    bits[...] = source
    bits <<= 16


def as_numbers(source: Array, dtype: DType) -> Array:
    """Return float elements in a dtype that numpy can compute with: bfloat16 bits as float32."""
    if dtype != BFLOAT16:
        return source
    return (source.astype(np.uint32) << 16).view(np.float32)


_scratch = threading.local()


def _to_bfloat16(values: Array, target: Array) -> bool:
    """Write float32 values as bfloat16 bits and return whether a result is infinite or NaN."""
    if not hasattr(_scratch, "bits"):
        _scratch.bits = np.empty(_BLOCK, np.uint32)
    bits = values.view(np.uint32)
    work = _scratch.bits[: values.size]
    # Round to nearest even: add 0x7FFF and the lowest bit that is kept, then drop 16 bits. A NaN
    # can overflow here; `_fix_special_values` writes its bits.
    np.right_shift(bits, 16, out=work)
    np.bitwise_and(work, 1, out=work)
    np.add(work, 0x7FFF, out=work)
    np.add(work, bits, out=work)
    np.right_shift(work, 16, out=work)
    np.copyto(target, work, casting="unsafe")
    limit = _MAX_FINITE[BFLOAT16]
    # The minimum and maximum of values with a NaN are NaN, for which every comparison is false.
    return not (-limit <= values.min(initial=0) and values.max(initial=0) <= limit)


def _fix_special_values(
    numbers: Array, target: Array, target_dtype: DType, clamp: bool
) -> tuple[int, int]:
    if target_dtype == BFLOAT16:
        target[np.isnan(numbers)] = _NAN_BFLOAT16
        infinite = (target & 0x7FFF) == 0x7F80
        zero = (target & 0x7FFF) == 0
    else:
        infinite = np.isinf(target)
        zero = target == 0
    infinite &= np.isfinite(numbers)
    overflowed = int(np.count_nonzero(infinite))
    if overflowed and clamp:
        _clamp(numbers, target, target_dtype, infinite)
    return overflowed, int(np.count_nonzero(zero & (numbers != 0)))


def _clamp(numbers: Array, target: Array, target_dtype: DType, infinite: Array) -> None:
    limit = np.float32(_MAX_FINITE[target_dtype])
    clamped = np.where(np.signbit(numbers[infinite]), -limit, limit)
    if target_dtype == BFLOAT16:
        target[infinite] = (clamped.view(np.uint32) >> 16).astype(np.uint16)
    else:
        target[infinite] = clamped
