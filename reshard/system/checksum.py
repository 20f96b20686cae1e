"""CRC-32 (the zip polynomial), and combining the CRCs of parts into the CRC of the whole.

Parts of a record are read by different workers in any order, so their checksums are combined
afterwards: ``combine(crc(a), crc(b), len(b)) == crc(a + b)``. The arithmetic is that of
multiplication modulo the CRC polynomial over GF(2) (zlib 1.2.12, ``crc32_combine``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import cache, lru_cache

try:  # isal is optional and computes the same CRC three times faster
    from isal.isal_zlib import crc32
except ImportError:
    crc32 = zlib.crc32
_combine: Callable[[int, int, int], int] | None
try:
    from isal.isal_zlib import crc32_combine as _combine
except ImportError:  # isal before 1.7
    _combine = None

__all__ = ["combine", "crc32", "join"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # x^0, bits are reflected


def _multiply(a: int, b: int) -> int:
    """Return ``a * b`` modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _squared(times: int) -> int:
    """Return ``x ** (2 ** times)`` modulo the polynomial."""
    if times == 0:
        return _ONE >> 1
    half = _squared(times - 1)
    return _multiply(half, half)


@lru_cache(maxsize=1 << 16)
def _shift(nbytes: int) -> int:
    """Return ``x ** (8 * nbytes)``, the factor for appending that many zero bytes."""
    power = _ONE
    bit = 3  # a byte is 8 = 2 ** 3 bits, so bit n of `nbytes` stands for x ** (2 ** (n + 3))
    while nbytes:
        if nbytes & 1:
            power = _multiply(_squared(bit), power)
        nbytes >>= 1
        bit += 1
    return power


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC of two concatenated parts from their CRCs and the length of the second."""
    if _combine is not None:
        return _combine(first, second, second_nbytes)
    return _multiply(_shift(second_nbytes), first) ^ second


def join(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC of consecutive parts, each given as (crc, nbytes)."""
    total = 0
    for crc, nbytes in parts:
        total = combine(total, crc, nbytes)
    return total
