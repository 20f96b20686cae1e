"""CRC-32 (the zip polynomial), and the CRC of a whole from the CRCs of its parts.

Parts of a record are read by different workers in any order, so their checksums are combined
afterwards: ``combine(crc(a), crc(b), len(b)) == crc(a + b)``. The arithmetic is that of
multiplication modulo the CRC polynomial over GF(2) (zlib 1.2.12, ``crc32_combine``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache, lru_cache

try:  # isal computes the same CRC three times faster where it is installed
    from isal.isal_zlib import crc32
except ImportError:
    crc32 = zlib.crc32

__all__ = ["combine", "crc32", "join"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # x^0, bits are reflected


def _multiply(a: int, b: int) -> int:
    """``a * b`` modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _squared(times: int) -> int:
    """``x ** (2 ** times)`` modulo the polynomial."""
    if times == 0:
        return _ONE >> 1
    half = _squared(times - 1)
    return _multiply(half, half)


@lru_cache(maxsize=1 << 16)
def _shift(nbytes: int) -> int:
    """``x ** (8 * nbytes)``: what appending that many zero bytes multiplies by."""
    power = _ONE
    bit = 3
    while nbytes:
        if nbytes & 1:
            power = _multiply(_squared(bit), power)
        nbytes >>= 1
        bit += 1
    return power


def combine(first: int, second: int, second_nbytes: int) -> int:
    """CRC of the concatenation of two parts, from their CRCs and the second one's length."""
    return _multiply(_shift(second_nbytes), first) ^ second


def join(parts: Iterable[tuple[int, int]]) -> int:
    """CRC of parts that follow one another, each given as (crc, nbytes)."""
    total = 0
    for crc, nbytes in parts:
        total = combine(total, crc, nbytes)
    return total
