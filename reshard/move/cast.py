"""Copy and cast of strided blocks in memory: numpy only, no torch.

A cast rounds to nearest even, as ``torch.Tensor.to`` does, which takes a float64 to 16 bits by way
of float32; a NaN becomes bfloat16's 0x7FC0 (torch's own bits for it depend on the vector unit).
bfloat16 has no numpy dtype, so its bits are made here; blocks stay in the cache between the passes.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from reshard.errors import UnsupportedError

_BLOCK = 1 << 18  # elements; shorter blocks spend their time in calls and in waiting for the GIL
_NUMPY = {FLOAT64: "<f8", FLOAT32: "<f4", FLOAT16: "<f2", BFLOAT16: "<u2"}
_BITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_EXPONENT_BITS = {FLOAT64: 11, FLOAT32: 8, BFLOAT16: 8, FLOAT16: 5}
_MAX_FINITE = {FLOAT16: 65504.0, BFLOAT16: 3.3895313892515355e38, FLOAT32: 3.4028234663852886e38}
_NAN_BFLOAT16 = 0x7FC0  # torch 2.13 torch/headeronly/util/BFloat16.h, round_to_nearest_even

Array = NDArray[Any]


def numpy_dtype(dtype: DType, *, casting: bool) -> str:
    """How numpy sees the elements: as numbers for a cast, as bits for a copy.

    Raises:
        UnsupportedError: a cast of a dtype that is never cast.
    """
    if not casting:
        return _BITS[dtype.itemsize]
    if dtype not in _NUMPY:
        raise UnsupportedError(str(dtype), "is never cast", "keep it, or exclude the tensor")
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
    """Fill ``target`` with ``source`` in another float dtype; arrays of equal shape.

    Args:
        source, target: as numpy sees ``dtype`` and ``target_dtype`` (`numpy_dtype`): bfloat16 as
            its bits, uint16.
        factor: what the numbers are multiplied by, before they are rounded.
        clamp: write the largest finite value where the result would be infinite.

    Returns:
        How many finite elements became (or, clamped, would have become) infinite, and how many
        others became zero. The second is counted where the target has fewer exponent bits; from
        float32 to bfloat16 only subnormals below 1e-38 can become zero, and are not counted.
    """
    if not (source.ndim == 1 and source.flags.c_contiguous and target.flags.c_contiguous):
        flat = np.empty(source.size, target.dtype)
        line = np.ascontiguousarray(source).reshape(-1)
        counts = cast(line, flat, dtype, target_dtype, clamp=clamp, factor=factor)
        target[...] = flat.reshape(source.shape)
        return counts
    overflowed = flushed = 0
    with np.errstate(all="ignore"):
        for start in range(0, source.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            numbers, held = as_numbers(source[block], dtype), dtype
            if factor != 1.0:
                wide = numbers.astype(np.float32) if dtype.itemsize < FLOAT32.itemsize else numbers
                numbers = wide * wide.dtype.type(factor)
                held = FLOAT64 if dtype == FLOAT64 else FLOAT32
            counts = _cast_block(numbers, target[block], held, target_dtype, clamp)
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
        by_way = target_dtype == FLOAT16 and dtype == FLOAT64
        target[...] = numbers.astype(np.float32) if by_way else numbers
        special = narrower and _has_special(target)
    if special:
        overflowed, flushed = _narrowed(numbers, target, target_dtype, clamp)
        return overflowed, flushed if narrower else 0
    if narrower:
        return 0, int(np.count_nonzero(numbers != 0)) - _nonzeros(target)
    return 0, 0


def _has_special(target: Array) -> bool:
    """Whether an infinity or a NaN is among floats; by their bits, of which numpy is quicker."""
    bits = target.view(_BITS[target.itemsize])
    sign = 1 << (8 * target.itemsize - 1)
    infinity = int(np.asarray(np.inf, target.dtype).view(bits.dtype))
    signed = bits.view(f"<i{target.itemsize}")
    return bool(signed.max(initial=0) >= infinity or bits.max(initial=0) >= sign | infinity)


def _nonzeros(target: Array) -> int:
    """How many floats are neither 0 nor -0."""
    bits = target.view(_BITS[target.itemsize])
    return int(np.count_nonzero(bits << 1))  # without the sign


def as_numbers(source: Array, dtype: DType) -> Array:
    """Float elements as numpy computes with them: bfloat16's bits as float32."""
    if dtype != BFLOAT16:
        return source
    return (source.astype(np.uint32) << 16).view(np.float32)


_scratch = threading.local()


def _to_bfloat16(values: Array, target: Array) -> bool:
    """Write the bits; whether an infinity or a NaN is among them, or a value that became one."""
    if not hasattr(_scratch, "bits"):
        _scratch.bits = np.empty(_BLOCK, np.uint32)
    bits = values.view(np.uint32)
    work = _scratch.bits[: values.size]
    np.right_shift(bits, 16, out=work)
    np.bitwise_and(work, 1, out=work)
    np.add(work, 0x7FFF, out=work)
    np.add(work, bits, out=work)
    np.right_shift(work, 16, out=work)
    np.copyto(target, work, casting="unsafe")
    limit = _MAX_FINITE[BFLOAT16]
    return not (-limit <= values.min(initial=0) and values.max(initial=0) <= limit)


def _narrowed(numbers: Array, target: Array, target_dtype: DType, clamp: bool) -> tuple[int, int]:
    """Settle what a narrower dtype cannot hold: NaN bits, infinities, zeros; count the last two."""
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
