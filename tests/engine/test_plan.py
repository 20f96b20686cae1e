"""Plans as plain data: windows tile the targets, copies paint every byte of a window once."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from reshard.core import dtypes
from reshard.core.box import Box, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.manifest import Entry, OutputFile, Skeleton, SourceFile
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning import planner
from reshard.engine.planning.copies import Copy, CopyPlanner, plan_block
from reshard.engine.planning.extents import FileIndex
from reshard.engine.planning.planner import Plan
from reshard.errors import ReshardError
from reshard.layouts.runs import EqualRuns, RankOffsets
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from tests.support.computed import Computed
from tests.support.random_checkpoints import (
    scene,
    sharded_target,
    single,
    whole_target,
)

F32 = dtypes.FLOAT32
WINDOWS = (1, 64, 1 << 10, 4 << 20)


def targets(made, seed):
    return [whole_target(made), whole_target(made, files=3), sharded_target(made, seed)]


def painted(window):
    """Return how often each byte of a window is filled."""
    count = np.zeros(window.nbytes, int)
    for copy in window.copies:
        size = copy.target_dtype.itemsize
        for index in product(*map(range, copy.shape)):
            at = copy.target_offset
            at += sum(i * s for i, s in zip(index, copy.target_strides, strict=True))
            assert 0 <= at <= window.nbytes - size
            count[at : at + size] += 1
    return count


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("seed", range(6))
def test_windows_tile_every_target_in_order_and_copies_paint_each_byte_once(
    tmp_path, seed, window_bytes
):
    """`test_execute` compares the bytes."""
    made = scene(tmp_path, seed)
    for number, target in enumerate(targets(made, seed)):
        planned = Plan(made.entries, target, window_bytes)
        chunks = [chunk for entry in target.entries for chunk in entry.chunks]
        wanted = {(chunk.file, byte) for chunk in chunks for byte in range(*chunk.byte_span)}
        held = []
        for window in planned:
            end = window.byte_offset + window.nbytes
            held += [(window.file, byte) for byte in range(window.byte_offset, end)]
            assert (painted(window) == 1).all()
        assert len(held) == len(wanted)
        assert set(held) == wanted
        places = [(window.file, window.byte_offset) for window in planned]
        assert places == sorted(places) or number == 2  # which has columns
        largest = max(window.nbytes for window in planned)
        assert min(window.nbytes for window in planned) > 0
        assert largest <= planned.window_bytes
        assert largest <= max(window_bytes, 8)
        assert planned.window_bytes <= max(window_bytes, 16)


def test_copies_hold_to_the_limit_of_the_wider_side():
    narrow, wide = (
        contiguous("s", 64 * n, dtype, Box((4 * n,), (4,)))
        for n, dtype in enumerate((dtypes.BFLOAT16, dtypes.FLOAT64))
    )
    source = Entry("w", "param", dtypes.BFLOAT16, (8,), (narrow, wide))
    target = contiguous("o", 0, dtypes.BFLOAT16, whole((8,)))
    skeleton = Skeleton((OutputFile("o", 16),), (replace(source, chunks=(target,)),))
    planned = Plan({source.key: source}, skeleton, 16)
    (window,) = planned
    assert [c.numel * c.dtype.itemsize for c in window.copies] == [4, 4, 16, 16]
    assert planned.copied_bytes == 4 * 2 + 4 * 8


def halves(name, shape=(4, 4), dtype=dtypes.FLOAT32):
    """Return a tensor whose columns are in two files."""
    rows, columns = shape
    boxes = [Box((0, at), (rows, columns // 2)) for at in (0, columns // 2)]
    chunks = tuple(contiguous(f"{name}{n}", 0, dtype, b) for n, b in enumerate(boxes))
    return Entry("w", "param", dtype, shape, chunks)


def test_a_tensor_no_larger_than_a_window_is_taken_file_by_file():
    source, target = halves("s"), halves("o", shape=(4, 4))
    moved = Box((0, 1), (4, 2))
    source = replace(
        source,
        chunks=(
            contiguous("s0", 0, F32, Box((0, 0), (4, 1))),
            contiguous("s1", 0, F32, moved),
            contiguous("s2", 0, F32, Box((0, 3), (4, 1))),
        ),
    )
    skeleton = Skeleton((OutputFile("o0", 32), OutputFile("o1", 32)), (target,))
    for limit, together in ((63, 2), (64, 1), (65, 1)):
        batches = list(Plan({source.key: source}, skeleton, limit).batches())
        assert max(map(len, batches)) == together


def test_columns_become_equal_runs_file_by_file():
    source = halves("s", shape=(8, 8))
    places = RankOffsets(("o0", "o1", "o2"), (0, 0, 0))
    target = replace(source, chunks=EqualRuns(places, F32, (8, 8), 0))
    skeleton = Skeleton(tuple(OutputFile(file, 88) for file in places.files), (target,))
    batches = list(Plan({source.key: source}, skeleton, 16).batches())
    assert {len(batch) for batch in batches} == {1}
    assert sum(window.nbytes for (window,) in batches) == source.nbytes


def test_factors_of_both_sides_are_one_factor_of_the_copy():
    source = halves("s")
    source = replace(source, chunks=tuple(replace(c, factor=6.0) for c in source.chunks))
    for wanted, factor in ((1.0, 6.0), (2.0, 3.0)):
        target = halves("o")
        target = replace(target, chunks=tuple(replace(c, factor=wanted) for c in target.chunks))
        skeleton = Skeleton((OutputFile("o0", 32), OutputFile("o1", 32)), (target,))
        planned = Plan({source.key: source}, skeleton)
        assert {copy.factor for window in planned for copy in window.copies} == {factor}


def test_neighbours_share_a_window_that_they_just_fill():
    made = [Entry(name, "param", F32, (2,), ()) for name in ("a", "b")]
    box = whole((2,))
    held = {e.key: replace(e, chunks=(contiguous(e.fqn, 0, F32, box),)) for e in made}
    placed = [
        replace(e, chunks=(contiguous("o", 100 + 8 * n, F32, box),)) for n, e in enumerate(made)
    ]
    skeleton = Skeleton((OutputFile("o", 116),), tuple(placed))
    for limit, sizes in ((15, [8, 8]), (16, [16])):
        assert [window.nbytes for window in Plan(held, skeleton, limit)] == sizes


def test_a_large_window_takes_everything_adjacent_at_once(tmp_path):
    made = scene(tmp_path, 2)
    assert len(list(Plan(made.entries, whole_target(made)))) == 1


def test_a_plan_moves_each_byte_once_whatever_the_replicas(tmp_path):
    for seed in range(6):
        made = scene(tmp_path, seed, layouts=("replicas",))
        planned = Plan(made.entries, whole_target(made), 256)
        assert planned.copied_bytes == sum(entry.nbytes for entry in made.entries.values())


def test_a_plan_does_not_depend_on_the_order_of_chunks(tmp_path):
    made = scene(tmp_path, 3, layouts=("flat", "grid", "columns"))
    target = whole_target(made)
    first = list(Plan(made.entries, target, 128))
    chance = random.Random(1)
    for _ in range(5):
        shuffled = {}
        for key, entry in made.entries.items():
            chunks = list(entry.chunks)
            chance.shuffle(chunks)
            shuffled[key] = replace(entry, chunks=tuple(chunks))
        assert list(Plan(shuffled, target, 128)) == first


def test_neighbouring_runs_become_one_copy():
    pieces = [contiguous("f", 4 * i, dtypes.FLOAT32, Box((i,), (1,))) for i in range(100)]
    entry = Entry("w", "param", dtypes.FLOAT32, (100,), tuple(reversed(pieces)))
    copies = plan_block(entry, whole((100,)), dtypes.FLOAT32).copies
    assert [(c.shape, c.byte_offset) for c in copies] == [((100,), 0)]


def test_runs_that_are_neighbours_on_one_side_only_stay_apart():
    first = contiguous("f", 0, dtypes.FLOAT32, Box((0,), (4,)))
    moved = contiguous("f", 20, dtypes.FLOAT32, Box((4,), (4,)))
    other = contiguous("g", 16, dtypes.FLOAT32, Box((4,), (4,)))
    for second in (moved, other):
        entry = Entry("w", "param", dtypes.FLOAT32, (8,), (first, second))
        assert len(plan_block(entry, whole((8,)), dtypes.FLOAT32).copies) == 2


def test_a_block_reads_from_exactly_the_chunks_that_meet_it(tmp_path):
    chance = random.Random(4)
    made = scene(tmp_path, 4, shapes=((11, 17),) * 5, layouts=("flat", "grid", "columns"))
    for entry in made.entries.values():
        for _ in range(40):
            origin = tuple(chance.randint(0, n - 1) for n in entry.shape)
            extent = tuple(
                chance.randint(1, n - o) for n, o in zip(entry.shape, origin, strict=True)
            )
            window = plan_block(entry, Box(origin, extent), entry.dtype)
            assert (painted(window) == 1).all()


def test_a_block_of_nothing_has_no_copies():
    entry = Entry(
        "w",
        "param",
        dtypes.FLOAT32,
        (3, 4),
        (contiguous("f", 0, dtypes.FLOAT32, whole((3, 4))),),
    )
    window = plan_block(entry, Box((1, 2), (0, 2)), dtypes.FLOAT32)
    assert (window.nbytes, window.copies) == (0, ())


def columns_of_one_file(**second):
    """Return a matrix whose columns are listed apart, though one file stores it whole."""
    left, middle, right, last = (
        replace(contiguous("f", 4 * at, F32, Box((0, at), (3, 1))), byte_strides=(16, 4))
        for at in range(4)
    )
    return Entry("w", "param", F32, (3, 4), (left, replace(middle, **second), right, last))


@pytest.mark.parametrize(
    ("second", "sizes"),
    [
        ({}, [4]),
        ({"file": "g"}, [1, 1, 2]),
        ({"factor": 2.0}, [1, 1, 2]),
        ({"dtype": dtypes.BY_NAME["int32"]}, [1, 1, 2]),
        ({"byte_offset": 5}, [1, 1, 2]),
    ],
)
def test_parts_of_a_row_are_one_copy_where_they_are_adjacent_in_file_and_row(second, sizes):
    source = columns_of_one_file(**second)
    window = plan_block(source, Box((1, 0), (1, 4)), F32)
    assert [copy.numel for copy in window.copies] == sizes
    assert (painted(window) == 1).all()
    spread = CopyPlanner(source).plan_box(Box((1, 0), (1, 4)), F32, (32, 8), 0)
    assert [copy.numel for copy in spread] == [1] * 4  # with gaps between them in the window


def test_a_copy_is_a_run_if_no_side_has_gaps():
    both = {"dtype": dtypes.BFLOAT16, "target_dtype": F32}
    for shape, strides, target, is_run in (
        ((), (), (), True),
        ((5,), (2,), (4,), True),
        ((5,), (4,), (4,), False),
        ((5,), (2,), (8,), False),
        ((5, 3), (6, 2), (12, 4), False),
        ((5, 3), (2, 10), (4, 20), False),
    ):
        copy = Copy("w", shape, "f", 0, strides, target_offset=0, target_strides=target, **both)
        assert copy.is_run is is_run


def computed(name, dtype, box, tile, *, follows=""):
    """Return a chunk whose bytes are computed in tiles."""
    work = Computed(box.volume * dtype.itemsize, tile)
    return contiguous(Derived("f", name, work, follows=follows), 0, dtype, box)


@pytest.mark.parametrize(
    ("tiles", "limit", "sizes"),
    [
        ((12, 12), 40, [36, 36, 8]),  # whole tiles, as many as fit
        ((12, 12), 4, [12] * 6 + [8]),  # a tile is not cut, though the window is smaller
        ((8, 20), 44, [40, 40]),  # of the larger ones
        ((1, 1), 28, [28, 28, 24]),
        ((24, 0), 24, [24, 24, 24, 8]),
    ],
)
def test_windows_have_whole_tiles_of_what_is_computed(tiles, limit, sizes):
    boxes = [Box((0,), (10,)), Box((10,), (10,))]
    chunks = (
        computed(f"{n}", F32, box, tile)
        for n, (box, tile) in enumerate(zip(boxes, tiles, strict=True))
    )
    source = Entry("w", "param", F32, (20,), tuple(chunks))
    planned = Plan({source.key: source}, single(source), limit)
    assert [window.nbytes for window in planned] == sizes


def test_a_large_tile_or_one_of_columns_is_cut():
    flat, columns = Box((0,), (32 << 20,)), Box((0, 0), (4, 3))
    for tile, nbytes in ((64 << 20, 64 << 20), ((64 << 20) + 4, 4 << 20)):
        source = Entry("w", "param", F32, flat.shape, (computed("0", F32, flat, tile),))
        planned = Plan({source.key: source}, single(source), 4 << 20)
        assert {window.nbytes for window in planned} == {nbytes}
    source = Entry("w", "param", F32, (4, 3), (computed("0", F32, columns, 48),))
    part = contiguous("o", 0, F32, Box((0, 0), (4, 2)))
    target = replace(source, chunks=(part, contiguous("p", 0, F32, Box((0, 2), (4, 1)))))
    skeleton = Skeleton((OutputFile("o", 32), OutputFile("p", 16)), (target,))
    planned = Plan({source.key: source}, skeleton, 8).without_interleaving()
    assert [window.nbytes for window in planned] == [8] * 6


@pytest.mark.parametrize(
    ("follows", "order"),
    [
        ({}, "abcde"),
        ({"a": "b0"}, "bcade"),
        ({"a": "b0", "c": "b0"}, "bdace"),
        ({"a": "d0", "b": "c0"}, "cdbea"),
        ({"a": "e0"}, "bcdea"),
        ({"a": "of another file", "e": "b0"}, "bceda"),
        (dict.fromkeys("abcde", "of another file"), "abcde"),
    ],
)
def test_what_costs_less_after_others_comes_behind_them_and_the_next(follows, order):
    made = [Entry(name, "param", F32, (4,), ()) for name in "abcde"]
    held = [
        replace(
            entry,
            chunks=tuple(
                computed(
                    f"{entry.fqn}{n}",
                    *(F32, Box((2 * n,), (2,)), 1),
                    follows=f"f\0{follows[entry.fqn]}" if entry.fqn in follows and not n else "",
                )
                for n in (0, 1)
            ),
        )
        for entry in made
    ]
    planned = Plan({entry.key: entry for entry in held}, single(*made), 16)
    assert "".join("abcde"[window.byte_offset // 16] for window in planned) == order


def test_bands_hold_to_the_limit_of_the_wider_side():
    source = replace(halves("s", (8, 8)), dtype=dtypes.BFLOAT16)
    narrow = contiguous("s", 0, dtypes.BFLOAT16, whole((8, 8)))
    source = replace(source, chunks=(narrow,))
    target = halves("o", (8, 8), dtypes.FLOAT64)
    skeleton = Skeleton((OutputFile("o0", 256), OutputFile("o1", 256)), (target,))
    batches = list(Plan({source.key: source}, skeleton, 128).batches())
    assert [[w.nbytes for w in batch] for batch in batches] == [[64, 64]] * 4


def test_a_tensor_without_chunks_in_the_target_has_no_windows():
    source = Entry("w", "param", F32, (0,), (contiguous("s", 0, F32, whole((0,))),))
    assert list(Plan({source.key: source}, Skeleton((), (replace(source, chunks=()),)))) == []


def test_planners_and_files_are_freed_as_soon_as_their_windows_are_planned(monkeypatch):
    """The plan of a file needs the planners of the tensors that the file, or a later one, holds."""
    alive, dropped = weakref.WeakSet(), []

    class Watched(CopyPlanner):
        def __init__(self, source):
            super().__init__(source)
            alive.add(self)

    original = FileIndex.drop
    monkeypatch.setattr(planner, "CopyPlanner", Watched)
    monkeypatch.setattr(
        FileIndex, "drop", lambda self, file: (dropped.append(file), original(self, file))
    )
    box = Box((0,), (4,)), Box((4,), (4,))
    made = [Entry(f"w{n}", "param", F32, (8,), ()) for n in range(5)]
    sources = {e.key: replace(e, chunks=(contiguous("s", 0, F32, whole((8,))),)) for e in made}
    placed = [  # each tensor is in two neighbouring files
        replace(e, chunks=tuple(contiguous(f"o{n + m}", 16 * (1 - m), F32, box[m]) for m in (0, 1)))
        for n, e in enumerate(made)
    ]
    planned = Plan(
        sources, Skeleton(tuple(OutputFile(f"o{n}", 32) for n in range(6)), tuple(placed))
    )
    counts = []
    for window in planned:
        assert window.copies
        del window
        counts.append((len(dropped), len(alive)))
    assert counts == [(n, 2 if 0 < n < 5 else 1) for n in range(6)]


def test_the_copies_of_two_windows_are_equal_if_each_copy_is(tmp_path):
    made = scene(tmp_path, 1)
    first, second, *_ = Plan(made.entries, whole_target(made), 64)
    assert first.copies == tuple(first.copies)
    assert first.copies != second.copies
    assert first.copies != tuple(second.copies)
    assert first.copies != list(first.copies)


def test_an_entry_that_the_source_lacks_is_refused(tmp_path):
    made = scene(tmp_path, 1)
    target = whole_target(made)
    lost = {key: entry for key, entry in made.entries.items() if key[1] != "t06"}
    with pytest.raises(ReshardError, match=r"t06.*lacks it"):
        Plan(lost, target)


def test_an_entry_of_another_shape_is_refused(tmp_path):
    made = scene(tmp_path, 1)
    target = whole_target(made)
    key = ("param", "t06")
    turned = replace(made.entries[key], shape=(17, 11))
    with pytest.raises(ReshardError, match=r"t06.*\(17, 11\)"):
        Plan({**made.entries, key: turned}, target)


def test_a_target_that_is_not_contiguous_is_refused():
    stored = contiguous("f", 0, dtypes.FLOAT32, whole((4, 4)))
    entry = Entry("w", "param", dtypes.FLOAT32, (4, 4), (stored,))
    turned = Chunk(whole((4, 4)), "o", 0, (4, 16), dtypes.FLOAT32)
    skeleton = Skeleton((OutputFile("o", 64),), (replace(entry, chunks=(turned,)),))
    with pytest.raises(ReshardError, match="would not be contiguous"):
        Plan({entry.key: entry}, skeleton)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_ranks_share_by_columns_is_read_once(tmp_path, monkeypatch, ranks):
    """Each band of rows is one batch, and its bytes are read once for all ranks."""
    rows, width = 600, 24 * 10
    values = np.arange(rows * width, dtype="<f4").reshape(rows, width)
    path = tmp_path / "source"
    path.write_bytes(values.tobytes())
    held = contiguous(str(path), 0, dtypes.FLOAT32, Box((0, 0), values.shape))
    entry = Entry("w", "param", dtypes.FLOAT32, values.shape, (held,))
    step = width // ranks
    chunks = tuple(
        contiguous(f"{rank}", 0, dtypes.FLOAT32, Box((0, rank * step), (rows, step)))
        for rank in range(ranks)
    )
    files = tuple(OutputFile(f"{rank}", 4 * rows * step) for rank in range(ranks))
    skeleton = Skeleton(files, (replace(entry, chunks=chunks),))
    planned = Plan({entry.key: entry}, skeleton, 1 << 14)
    batches = list(planned.batches())
    assert len(batches) == -(-rows * width * 4 // (17 * width * 4)) > 30
    assert all([w.file for w in batch] == [f.name for f in files] for batch in batches)
    read = []
    original = SourceFiles.read_into

    def counted(self, path, offset, target):
        if path == held.file:
            read.append(len(target))
        original(self, path, offset, target)

    monkeypatch.setattr(SourceFiles, "read_into", counted)
    sources = {held.file: SourceFile(held.file, values.nbytes)}
    execute(planned, sources, tmp_path / "out", MoveOptions(workers=2, read_bytes=1 << 14))
    assert sum(read) <= values.nbytes
    for rank in range(ranks):
        made = np.fromfile(tmp_path / "out" / f"{rank}", "<f4").reshape(rows, step)
        assert (made == values[:, rank * step : (rank + 1) * step]).all()


def test_columns_that_lie_as_they_are_wanted_are_no_batch(tmp_path):
    made = scene(tmp_path, 4, layouts=("columns",))
    entries = []
    for entry in made.entries.values():
        boxes = {chunk.box for chunk in entry.chunks}
        chunks = (contiguous(f"{n}", 0, entry.dtype, b) for n, b in enumerate(boxes))
        entries.append(replace(entry, chunks=tuple(chunks)))
    same = Skeleton((), tuple(entries))
    assert {len(batch) for batch in Plan(made.entries, same, 64).batches()} == {1}


def test_every_block_of_nested_chunks_is_filled_whatever_lies_between_its_ends():
    rows, columns = 5, 6
    parts = [  # a frame around a frame: the flat spans of the first ones hold those of others
        Box((0, 0), (5, 1)),
        Box((0, 5), (5, 1)),
        Box((0, 1), (1, 4)),
        Box((4, 1), (1, 4)),
        Box((1, 1), (3, 1)),
        Box((1, 2), (1, 3)),
        Box((2, 2), (2, 3)),
    ]
    chunks = tuple(contiguous(f"s{n}", 0, F32, box) for n, box in enumerate(parts))
    source = Entry("w", "param", F32, (rows, columns), chunks)
    for top, left in product(range(rows), range(columns)):
        for height, width in product(range(1, rows - top + 1), range(1, columns - left + 1)):
            window = plan_block(source, Box((top, left), (height, width)), F32)
            assert (painted(window) == 1).all()
            places = [copy.target_offset for copy in window.copies]
            assert places == sorted(places)


def test_a_copy_has_as_few_dims_as_it_can():
    whole_tensor = contiguous("s", 0, F32, whole((4, 1, 3, 2)))
    source = Entry("w", "param", F32, (4, 1, 3, 2), (whole_tensor,))
    for shape, dims in (((4, 1, 3, 2), (24,)), ((4, 1, 2, 2), (4, 4)), ((4, 1, 2, 1), (4, 2))):
        (copy,) = plan_block(source, Box((0, 0, 0, 0), shape), F32).copies
        assert copy.shape == dims
