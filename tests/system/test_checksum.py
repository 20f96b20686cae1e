"""CRC arithmetic against zlib."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest

from reshard.system import checksum
from reshard.system.checksum import combine, crc32, join


def test_crc32_is_zlibs_on_any_buffer_and_any_start():
    chance = random.Random(1)
    for size in (0, 1, 3, 4, 5, 63, 64, 65, 1000, 70001):
        data = chance.randbytes(size)
        seed = chance.getrandbits(32)
        assert crc32(data) == zlib.crc32(data)
        assert crc32(memoryview(bytearray(data)), seed) == zlib.crc32(data, seed)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_join_of_random_splits_is_the_crc_of_the_whole(monkeypatch, is_compiled):
    if not is_compiled:
        monkeypatch.setattr(checksum, "_combine", None)
    chance = random.Random(3)
    for _ in range(200):
        data = chance.randbytes(chance.choice((0, 1, 64, 500, 9000)))
        cuts = sorted(chance.randint(0, len(data)) for _ in range(chance.randint(0, 9)))
        edges = [0, *cuts, len(data)]
        parts = [data[a:b] for a, b in pairwise(edges)]
        assert join((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(data)


def test_join_of_nothing_is_the_crc_of_nothing():
    assert join([]) == zlib.crc32(b"") == 0
    assert join([(0, 0), (0, 0)]) == 0


def test_combine_is_associative():
    chance = random.Random(4)
    for _ in range(300):
        a, b, c = (chance.getrandbits(32) for _ in range(3))
        n, m = chance.randint(0, 1 << 50), chance.randint(0, 1 << 50)
        assert combine(combine(a, b, n), c, m) == combine(a, combine(b, c, m), n + m)
