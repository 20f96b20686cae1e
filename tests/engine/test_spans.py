"""Ranges of files and their checksums, joined in whatever order they come."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reshard.engine.move import spans as module
from reshard.engine.move.spans import Spans
from reshard.system.checksum import crc32

DATA = bytes(range(256)) * 4


def of(start, stop):
    return start, stop - start, crc32(DATA[start:stop])


def ranges():
    bounds = st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA)))
    return st.lists(bounds.map(sorted), max_size=30)


@given(ranges(), st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(sorted))
def test_every_range_says_the_checksum_of_its_bytes(given, asked):
    spans = Spans(("x", *of(*each)) for each in given)
    held = {at for start, stop in given for at in range(start, stop)}
    for _, start, nbytes, crc in spans:
        assert crc == crc32(DATA[start : start + nbytes])
    assert {at for _, start, size, _ in spans for at in range(start, start + size)} == held
    assert spans.nbytes == len(held)
    start, stop = asked
    assert spans.covers("x", start, stop - start) == set(range(start, stop)).issubset(held)
    touching = spans.find_overlapping("x", start, stop - start)
    assert touching == sorted(touching)
    meeting = [(s, n, crc) for _, s, n, crc in spans if s < stop and s + n > start]
    if start < stop:
        assert touching == sorted(meeting)
        within = [(s, n, crc) for s, n, crc in meeting if s >= start and s + n <= stop]
        assert spans.find_inside("x", start, stop - start) == sorted(within)


@given(st.sets(st.integers(1, len(DATA) - 1), max_size=30), st.randoms(use_true_random=False))
def test_what_tiles_a_file_becomes_one_range_in_any_order(cuts, chance):
    edges = [0, *sorted(cuts), len(DATA)]
    tiles = [of(*edge) for edge in pairwise(edges)]
    chance.shuffle(tiles)
    spans = Spans(("x", *tile) for tile in tiles)
    assert list(spans) == [("x", *of(0, len(DATA)))]
    assert spans.nbytes == len(DATA)


def test_ranges_without_a_checksum_join_only_one_another():
    spans = Spans([("x", 0, 4, None), ("x", 4, 4, None), ("x", *of(8, 16)), ("y", 8, 8, None)])
    assert sorted(spans, key=str) == [("x", 0, 8, None), ("x", *of(8, 16)), ("y", 8, 8, None)]


def test_what_is_joined_stays_small_enough_to_be_done_again(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 100)
    spans = Spans(("x", *of(at, at + 10)) for at in range(0, 1000, 10))
    assert len(list(spans)) == 10
    assert max(nbytes for _, _, nbytes, _ in spans) == 100


def test_a_file_of_which_nothing_is_known_is_not_covered():
    spans = Spans([("x", *of(0, 10))])
    assert not spans.covers("y", 0, 1)
    assert spans.find_overlapping("y", 0, 1) == spans.find_inside("y", 0, 1) == []
    assert spans.files == ["x"]
