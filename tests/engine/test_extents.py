"""The index of output files: which files hold the same parts of the same tensors, shifted."""

from __future__ import annotations

import pytest

from reshard.core import dtypes
from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.manifest import Entry, Skeleton
from reshard.engine.planning.extents import FileIndex
from reshard.layouts.runs import EqualRuns, RankOffsets

F32 = dtypes.FLOAT32


def cut(offsets, numel, skipped, kind="master"):
    """Return a tensor that is cut over the files of the offsets."""
    return Entry(f"w{skipped}", kind, F32, (numel,), EqualRuns(offsets, F32, (numel,), skipped))


def index(*entries):
    return FileIndex(Skeleton((), entries))


FILES = ("a", "b", "c", "d")


def test_files_with_the_same_parts_have_one_key_and_their_own_places():
    masters = RankOffsets(FILES, (100, 200, 300, 400))
    slots = RankOffsets(FILES, (150, 250, 350, 460))  # the last one lies further behind
    # 4 elements in each file; 2, 2, 1 and none
    found = index(cut(masters, 16, 8), cut(masters, 5, 24), cut(slots, 16, 0, "exp_avg"))
    placed = [found.find_placement(file) for file in FILES]
    assert [place.position for place in placed] == [0, 1, 2, 3]
    assert [place.byte_offset for place in placed] == [100, 200, 300, 400]
    assert placed[0].key == placed[1].key  # full parts, equally far from each other
    assert len({place.key for place in placed}) == 3
    # from the first part to the end of the last one, in each flat tensor
    assert placed[1].ranges == [(208, 232), (250, 266)]


def test_a_file_whose_distances_differ_has_another_key():
    found = index(
        cut(RankOffsets(FILES, (0, 0, 0, 0)), 16, 0),
        cut(RankOffsets(FILES, (100, 100, 104, 100)), 16, 0, "exp_avg"),
    )
    keys = [found.find_placement(file).key for file in FILES]
    assert keys[0] == keys[1] == keys[3] != keys[2]


@pytest.mark.parametrize(("skipped", "is_placed"), [((0, 16, 32), True), ((0, 12, 32), False)])
def test_tensors_that_share_bytes_of_a_file_have_no_placement(skipped, is_placed):
    offsets = RankOffsets(FILES, (0, 0, 0, 0))
    found = index(*(cut(offsets, 16, at) for at in skipped))  # 16 bytes each
    assert (found.find_placement("a") is not None) is is_placed


def test_a_file_at_two_positions_or_with_a_listed_chunk_has_no_placement():
    turned = RankOffsets(FILES[::-1], (100, 100, 100, 100))
    found = index(cut(RankOffsets(FILES, (0, 0, 0, 0)), 16, 0), cut(turned, 16, 0, "exp_avg"))
    assert [found.find_placement(file) for file in FILES] == [None] * 4
    chunk = contiguous("a", 50, F32, whole((3,)))
    listed = Entry("v", "master", F32, (3,), (chunk,))
    found = index(cut(RankOffsets(FILES, (0, 0, 0, 0)), 16, 0), listed)
    assert found.find_placement("a") is None
    assert found.find_placement("b").position == 1


def test_a_file_that_is_dropped_is_no_longer_listed():
    found = index(cut(RankOffsets(FILES, (0, 0, 0, 0)), 16, 0))
    found.drop("b")
    assert found.files() == ["a", "c", "d"]
    assert list(found.extents("b")) == []
