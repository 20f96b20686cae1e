"""Equal runs held as numbers are the chunks that they stand for, and plan as those do."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from reshard.commands.output import check_overlaps
from reshard.containers import skeletons
from reshard.core import dtypes
from reshard.core.box import Box, whole
from reshard.core.chunks import FileSizes, ListedChunks, contiguous
from reshard.core.manifest import (
    Entry,
    Manifest,
    Origin,
    OutputFile,
    Skeleton,
    SourceFile,
    StoredChecksum,
    check,
)
from reshard.engine.planning.copies import plan_block
from reshard.engine.planning.extents import FileIndex
from reshard.engine.planning.planner import Plan
from reshard.errors import CorruptError, DifferentError
from reshard.layouts.partition import compute_equal_piece, run_chunks
from reshard.layouts.runs import EqualRuns, RankOffsets

F32 = dtypes.FLOAT32
SHAPES = ((7,), (3, 5), (4, 1, 6), (), (1,), (0, 3), (16, 16), (4, 64), (2, 4, 8))
KEY = ("master", "w")


def list_extents(skeleton):
    """Return the output files by name, each with its extents sorted by offset."""
    index = FileIndex(skeleton)
    return {file: index.sort_extents(file) for file in index.files()}


def runs(shape, ranks, name="s", skipped=8):
    """Return a tensor on so many ranks, whose files hold ``skipped`` bytes before it."""
    files = tuple(f"{name}{rank:02d}" for rank in range(ranks))
    places = RankOffsets(files, tuple(rank * 4 for rank in range(ranks)))
    return EqualRuns(places, dtypes.FLOAT32, shape, skipped)


def entry(held):
    return Entry("w", "master", dtypes.FLOAT32, held.shape, held)


def expanded(of):
    """Return the same manifest with explicit chunks in place of numbers."""
    return replace(of, chunks=tuple(of.chunks))


def skeleton(of):
    files = dict.fromkeys(chunk.file for chunk in of.chunks)
    return Skeleton(tuple(OutputFile(name, 1 << 20) for name in files), (of,))


def moved(planned):
    """Return (source file, byte) of every byte of every output file."""
    found = {}
    for window in planned:
        for copy in window.copies:
            for index in range(copy.numel):
                rest, at, to = index, copy.byte_offset, copy.target_offset
                dims = zip(copy.shape, copy.byte_strides, copy.target_strides, strict=True)
                for extent, stride, step in reversed(list(dims)):
                    rest, place = divmod(rest, extent)
                    at, to = at + place * stride, to + place * step
                key = window.file, window.byte_offset + to
                assert key not in found
                found[key] = copy.file, at
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_runs_are_the_chunks_of_equal_pieces(shape, ranks):
    held = runs(shape, ranks)
    boxes = [
        (chunk.box, chunk.file, chunk.byte_offset)
        for rank, file in enumerate(held.offsets.files)
        for start, stop in [compute_equal_piece(prod(shape), ranks, rank)]
        for piece in [contiguous(file, 4 * rank + 8, held.dtype, whole((stop - start,)))]
        for chunk in run_chunks(piece, 0, shape, start, stop)
    ]
    assert [(chunk.box, chunk.file, chunk.byte_offset) for chunk in held] == boxes
    assert len(held) == len(boxes)
    assert bool(held) is bool(prod(shape))
    assert held == tuple(held)
    assert held != tuple(held)[1:] or not boxes
    assert not boxes or (held[0], held[-1], held[:2]) == (
        *[tuple(held)[n] for n in (0, -1)],
        tuple(held)[:2],
    )


def test_a_run_that_lies_outside_its_file_is_found():
    held = runs((16, 16), 3)
    sizes = {file: 4 * rank + 8 + 4 * 86 for rank, file in enumerate(held.offsets.files)}

    def proof(change):
        files = {f: SourceFile(f, n + change.get(f, 0)) for f, n in sizes.items()}
        check(Manifest(Origin("test", ""), {KEY: entry(held)}, files, ordered=True))

    proof({})
    proof({"s02": -8})  # the last rank holds two elements less
    for file, lost in (("s00", -1), ("s01", -1), ("s02", -9)):
        with pytest.raises(CorruptError, match=r"'w' needs bytes"):
            proof({file: lost})


def test_a_run_before_the_first_byte_of_its_file_is_found():
    for at, outside in (((0, 0), None), ((-1, 0), "a"), ((-2, 0), "a"), ((0, -1), "b")):
        held = EqualRuns(RankOffsets(("a", "b"), at), dtypes.FLOAT32, (7,), 0)
        for last in (12, 99):  # the last rank holds 3 of 4 elements
            files = {"a": SourceFile("a", 99), "b": SourceFile("b", last)}
            manifest = Manifest(Origin("test", ""), {KEY: entry(held)}, files, ordered=True)
            with contextlib.ExitStack() as stack:
                if outside:
                    stack.enter_context(pytest.raises(CorruptError, match=f"^{outside}: "))
                check(manifest)


def test_what_follows_runs_in_a_manifest_is_checked_too():
    held = runs((16,), 2)
    files = {file: SourceFile(file, 99) for file in held.offsets.files}
    hole = replace(entry(held), fqn="v", chunks=(*held[1:],))
    with pytest.raises(CorruptError, match="'v'"):
        check(Manifest(Origin("test", ""), {KEY: entry(held), hole.key: hole}, files, ordered=True))


def test_runs_are_as_many_as_they_say():
    for shape in (*SHAPES, (3, 6, 2), (2, 3, 12), (9, 2), (5, 7)):
        for ranks in (1, 2, 3, 5, 8, 13, 32):
            held = runs(shape, ranks)
            chunks = tuple(held)
            assert len(held) == len(chunks), (shape, ranks)
            assert [held[n] for n in range(len(chunks))] == list(chunks)
            assert not held.ranks(1, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_runs_state_about_their_parts_is_what_the_parts_are(shape):
    numel = prod(shape)
    for ranks in (1, 2, 3, 7, 40):
        held = runs(shape, ranks)
        parts = [held.part(rank) for rank in range(ranks)]
        filled = [part for part in parts if part]
        assert filled == parts[: len(filled)]
        assert held.part_count == len(filled)
        regular = held.regular
        assert (regular.byte_offsets, regular.skipped) == (held.offsets.byte_offsets, 8)
        sizes = [stop - start for _, start, stop, *_ in filled]
        assert regular.nbytes == 4 * regular.step
        assert sizes[: regular.full] == [regular.step] * regular.full
        assert all(size < regular.step for size in sizes[regular.full :])
        assert regular.filled == len(filled)
        index = held.build_index()
        assert index.is_flat is True
        listed = ListedChunks(tuple(held), shape).build_index()
        for start, stop in product(range(0, numel + 1, 3), repeat=2):
            if start < stop:
                assert list(index.find_runs(start, stop)) == list(listed.find_runs(start, stop))


def test_runs_that_just_fit_into_their_files_are_proved_without_their_chunks():
    held = runs((16, 16), 3, skipped=0)  # 86, 86 and 84 elements, from byte 0, 4 and 8 on
    for room, proved in ((344, True), (343, False)):
        sizes = FileSizes({f: 4 * n + room for n, f in enumerate(held.offsets.files)}.__getitem__)
        assert (held.find_unproven(sizes) == ()) is proved
    behind = runs((16, 16), 3, skipped=40)
    sizes = FileSizes({f: 4 * n + 384 for n, f in enumerate(behind.offsets.files)}.__getitem__)
    assert behind.find_unproven(sizes) == ()


def test_extents_of_a_file_are_those_of_all_its_tensors():
    held = EqualRuns(
        RankOffsets(("a", "b", "c"), (0, 0, 0)), dtypes.FLOAT32, (4,), 0
    )  # "c" holds none
    column = contiguous("a", 40, dtypes.FLOAT32, Box((0, 2), (2, 3)))
    row = contiguous("a", 64, dtypes.FLOAT32, Box((1, 0), (1, 5)))
    row = replace(row, byte_strides=(20, 4))
    mixed = Entry("v", "master", dtypes.FLOAT32, (2, 5), (row, column))
    of = Skeleton((), (entry(held), mixed))
    found = {
        file: [(e.byte_offset, e.start, e.stop, e.numel, e.nbytes, e.is_run) for e in extents]
        for file, extents in list_extents(of).items()
    }
    assert found == {
        "a": [(0, 0, 2, 2, 8, True), (40, 2, 10, 6, 24, False), (64, 5, 10, 5, 20, True)],
        "b": [(0, 2, 4, 2, 8, True)],
        "c": [],
    }


@pytest.mark.parametrize("window_bytes", [4, 20, 1 << 20])
def test_a_plan_of_runs_moves_what_a_plan_of_their_chunks_moves(window_bytes):
    chance = random.Random(3)
    for shape in SHAPES:
        for before, after in [(1, 4), (4, 1), (3, 5), (8, 2), (chance.randint(2, 30), 6)]:
            source, target = entry(runs(shape, before)), entry(runs(shape, after, "o", 12))
            planned = Plan({KEY: source}, skeleton(target), window_bytes)
            wanted = moved(Plan({KEY: expanded(source)}, skeleton(expanded(target)), window_bytes))
            assert moved(planned) == wanted
            assert moved(Plan({KEY: source}, skeleton(expanded(target)), window_bytes)) == wanted
            assert moved(Plan({KEY: expanded(source)}, skeleton(target), window_bytes)) == wanted
            assert len(wanted) == prod(shape)
            assert planned.copied_bytes == 4 * prod(shape)
            assert planned.window_bytes >= max((w.nbytes for w in planned), default=0)
            assert list(planned) == list(planned)


@pytest.mark.parametrize("window_bytes", [4, 20, 1 << 20])
def test_columns_become_runs_as_they_become_the_chunks_of_runs(window_bytes):
    boxes = [Box((0, 0), (6, 3)), Box((0, 3), (6, 5))]
    chunks = tuple(contiguous(f"s{n}", 8, dtypes.FLOAT32, box) for n, box in enumerate(boxes))
    source, target = entry(runs((6, 8), 1)), entry(runs((6, 8), 5, "o", 12))
    source = replace(source, chunks=chunks)
    found = moved(Plan({KEY: source}, skeleton(target), window_bytes))
    assert found == moved(Plan({KEY: source}, skeleton(expanded(target)), window_bytes))
    assert len(found) == 48


def test_boxes_of_runs_and_turned_chunks_are_read_from_where_they_lie():
    source = entry(runs((6, 8), 5))
    for box in (
        whole((6, 8)),
        replace(whole((6, 3)), origin=(0, 4)),
        replace(whole((2, 8)), origin=(3, 0)),
    ):
        flat = plan_block(source, box, dtypes.FLOAT32)
        boxes = plan_block(expanded(source), box, dtypes.FLOAT32)
        assert moved([flat]) == moved([boxes])
    turned = replace(contiguous("s", 0, dtypes.FLOAT32, whole((6, 8))), byte_strides=(4, 24))
    held = Entry("w", "master", dtypes.FLOAT32, (6, 8), (turned,))
    found = moved([plan_block(held, whole((6, 8)), dtypes.FLOAT32)])
    assert found["", 4] == ("s", 24)  # a dense chunk that is no run of the tensor


def rank_file(name, begins, entries=()):
    """Return a file with two storages, the second of which begins somewhere."""
    checksums = (StoredChecksum(0, 8, (1,)), StoredChecksum(begins, 400, (2,)))
    return Skeleton((OutputFile(name, 999, checksums=checksums),), entries)


def test_files_alike_hold_each_rank_s_run_where_their_storage_begins():
    held = EqualRuns(RankOffsets(("a", "b", "c"), (8, 0, 0)), dtypes.FLOAT32, (16, 16), 8)
    first = rank_file("a", 8, (replace(entry(held), chunks=tuple(held.of_rank(0))),))
    spread = skeletons.lay_out_ranks(first, [rank_file("b", 8), rank_file("c", 72)])
    assert [file.name for file in spread.files] == ["a", "b", "c"]
    assert {
        file: [(e.byte_offset, e.start, e.stop) for e in held]
        for file, held in list_extents(spread).items()
    } == {
        "a": [(16, 0, 86)],
        "b": [(16, 86, 172)],
        "c": [(80, 172, 256)],
    }
    whole_one = replace(first.entries[0], chunks=tuple(held))
    with pytest.raises(AssertionError, match="2 runs"):
        skeletons.lay_out_ranks(rank_file("a", 8, (whole_one,)), [rank_file("b", 8)])


@pytest.mark.parametrize("strides", [(4, 8), (16, 4)])
def test_two_rows_that_lie_turned_or_apart_are_no_run(strides):
    stored = replace(contiguous("s", 0, dtypes.FLOAT32, whole((2, 3))), byte_strides=strides)
    source = Entry("w", "master", dtypes.FLOAT32, (2, 3), (stored,))
    found = moved(Plan({KEY: source}, skeleton(entry(runs((2, 3), 1, "o", 0)))))
    assert found["o00", 4] == ("s", strides[1])
    assert found["o00", 12] == ("s", strides[0])


def test_runs_of_the_output_are_multiplied_by_nothing():
    """Unlike chunks, runs of a target have no factor: what is stored keeps its own."""
    stored = contiguous("s", 0, dtypes.FLOAT32, whole((12,)))
    for factor in (1.0, 2.0):
        source = Entry("w", "master", dtypes.FLOAT32, (12,), (replace(stored, factor=factor),))
        planned = Plan({KEY: source}, skeleton(entry(runs((12,), 3, "o", 0))))
        assert {copy.factor for window in planned for copy in window.copies} == {factor}


def flat_tensors(prefix, ranks, sizes, *, begins, gap=0):
    """Return tensors of two kinds over the same files; each kind is one flat tensor of a file."""
    entries, dtype = [], dtypes.FLOAT32
    for kind, begin in zip(("master", "exp_avg"), begins, strict=True):
        files = tuple(f"{prefix}{rank}" for rank in range(ranks))
        # The headers of files with a longer name are longer, too.
        offsets = RankOffsets(files, tuple(begin + len(file) for file in files))
        skipped = 0
        for number, size in enumerate(sizes):
            runs = EqualRuns(offsets, dtype, (size,), skipped)
            entries.append(Entry(f"w{number}", kind, dtype, (size,), runs))
            skipped += runs.step * dtype.itemsize + gap
    return entries


SIZES = (1, 3, 12, 13, 100, 1024, 7, 0, 2047)


def plan_both(source, target, limit, monkeypatch):
    """Return the windows of a plan, and those of one that takes every file by itself."""
    held = {entry.key: entry for entry in source}
    files = sorted({chunk.file for entry in target for chunk in entry.chunks})
    skeleton = Skeleton(tuple(OutputFile(file, 1 << 20) for file in files), tuple(target))
    windows = list(Plan(held, skeleton, limit))
    with monkeypatch.context() as patched:
        patched.setattr(FileIndex, "find_placement", lambda *_: None)
        return windows, list(Plan(held, skeleton, limit))


def lie_apart(target, offsets):
    first, second, *more = offsets.byte_offsets
    places = RankOffsets(offsets.files, (first, second + 12, *more))
    for entry in target:
        of_kind = places if entry.kind == "exp_avg" else entry.chunks.offsets
        chunks = EqualRuns(of_kind, F32, entry.shape, entry.chunks.regular.skipped)
        yield replace(entry, chunks=chunks)


def lie_in_another_order(target, offsets):
    turned = RankOffsets(offsets.files[::-1], (40_000,) * len(offsets.files))
    yield from target
    yield Entry("w4", "more", F32, (100,), EqualRuns(turned, F32, (100,), 0))


def have_more(target, _offsets):
    yield from target
    yield Entry("w4", "more", F32, (100,), (contiguous("t0", 50_000, F32, whole((100,))),))


@pytest.mark.parametrize("differ", [lie_apart, lie_in_another_order, have_more])
def test_files_that_differ_are_planned_by_themselves(differ, monkeypatch):
    source = flat_tensors("s", 7, SIZES, begins=(64, 5000))
    (held,) = (entry for entry in source if entry.key == ("exp_avg", "w4"))
    target = flat_tensors("t", 5, SIZES, begins=(64, 20000))
    target = [*differ(target, target[-1].chunks.offsets)]
    for limit in (16, 1 << 20):
        windows, alone = plan_both(
            [*source, replace(held, kind="more")], target, limit, monkeypatch
        )
        assert windows == alone


def index_of(*parts):
    """Return the index of tensors of so many elements, cut over files, from byte ``skipped`` on."""
    cut = [
        Entry(f"w{at}", f"{number}", F32, (numel,), EqualRuns(places, F32, (numel,), at))
        for number, (places, numel, at) in enumerate(parts)
    ]
    return FileIndex(Skeleton((), cut))


FILES = ("a", "b", "c", "d")


def test_files_with_the_same_parts_share_a_plan():
    """4 elements of two tensors in each file; of the third one 2, 2, 1 and none."""
    first = RankOffsets(FILES, (100, 200, 300, 400))
    index = index_of(
        (first, 16, 8), (first, 5, 24), (RankOffsets(FILES, (150, 250, 350, 460)), 16, 0)
    )
    placed = [index.find_placement(file) for file in FILES]
    assert [(each.position, each.byte_offset) for each in placed] == [
        *((0, 100), (1, 200), (2, 300), (3, 400))
    ]
    assert placed[0].key == placed[1].key
    assert len({each.key for each in placed}) == 3
    assert placed[1].ranges == [(208, 232), (250, 266)]
    index.drop("b")
    assert index.files() == ["a", "c", "d"]


@pytest.mark.parametrize(("skipped", "is_placed"), [((0, 16, 32), True), ((0, 12, 32), False)])
def test_tensors_that_share_bytes_of_a_file_have_no_placement(skipped, is_placed):
    places = RankOffsets(FILES, (0, 0, 0, 0))
    index = index_of(*((places, 16, at) for at in skipped))  # 16 bytes each
    assert (index.find_placement("a") is not None) is is_placed


@pytest.mark.parametrize("ranks", [1, 2, 5, 12, 13, 40])
def test_windows_known_from_another_file_are_those_of_the_file(ranks, monkeypatch):
    source = flat_tensors("s", 7, SIZES, begins=(64, 5000))
    for begins in ((64, 20000), (64, 64 + 4 * sum(-(-size // ranks) for size in SIZES))):
        target = flat_tensors("t", ranks, SIZES, begins=begins)
        for limit in (16, 100, 1 << 20):
            windows, alone = plan_both(source, target, limit, monkeypatch)
            assert windows == alone
            assert sum(window.nbytes for window in windows) == 2 * 4 * sum(SIZES)


@pytest.mark.parametrize("nbytes", [0, 64, 100])
def test_regular_parts_that_overlap_or_leave_their_file_are_refused(nbytes):
    target = flat_tensors("t", 3, (30, 40), begins=(0, nbytes))  # 96 bytes a file and kind
    files = tuple(OutputFile(f"t{rank}", 300) for rank in range(3))
    if nbytes == 100:
        check_overlaps(Skeleton(files, tuple(target)))
    else:
        with pytest.raises(DifferentError, match="overlap"):
            check_overlaps(Skeleton(files, tuple(target)))
    short = (*files[:2], OutputFile("t2", 150))
    with pytest.raises(DifferentError, match=r"outside the file|overlap"):
        check_overlaps(Skeleton(short, tuple(target)))
    within = flat_tensors("t", 3, (30, 40), begins=(0, 200), gap=-4)
    with pytest.raises(DifferentError, match="overlap"):
        check_overlaps(Skeleton(files, tuple(within)))
