"""Real bytes: every layout into every target, checksums on the way, nothing wrong unseen."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reshard.core import dtypes
from reshard.core.box import Box, row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.manifest import Entry, OutputFile, Skeleton, SourceFile
from reshard.engine.move import distribution
from reshard.engine.move.execute import execute
from reshard.engine.move.fill import Filler
from reshard.engine.move.options import MoveOptions
from reshard.engine.output import files as output_files
from reshard.engine.planning.copies import Window
from reshard.engine.planning.planner import Plan
from reshard.errors import CorruptError, DifferentError, IncompleteError
from reshard.system.files import OpenFiles, SourceFiles
from tests.support.compiled import build_module
from tests.support.directories import read_files
from tests.support.random_checkpoints import (
    expected,
    run,
    scene,
    sharded_target,
    single,
    whole_target,
)

F32 = dtypes.FLOAT32


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_is_copied_into_any_target(tmp_path, seed):
    made = scene(tmp_path / "in", seed)
    targets = [whole_target(made), whole_target(made, files=3), sharded_target(made, seed)]
    for number, skeleton in enumerate(targets):
        outcome = run(made, skeleton, tmp_path / f"out{number}")
        assert read_files(tmp_path / f"out{number}") == expected(made, skeleton)
        assert not outcome.overflowed


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(("window_bytes", "read_bytes"), [(64, 64), (1 << 10, 7), (1, 1 << 20)])
def test_bytes_do_not_depend_on_workers_or_windows(tmp_path, workers, window_bytes, read_bytes):
    made = scene(tmp_path / "in", 100)
    for number, skeleton in enumerate([whole_target(made, files=2), sharded_target(made, 1)]):
        out = tmp_path / f"out{number}"
        run(made, skeleton, out, window_bytes=window_bytes, workers=workers, read_bytes=read_bytes)
        assert read_files(out) == expected(made, skeleton)


def test_an_expanded_source_is_read_whatever_the_read_limit(tmp_path):
    (tmp_path / "f").write_bytes(np.arange(6, dtype="<f4").tobytes())
    chunk = Chunk(whole((5, 6, 3)), str(tmp_path / "f"), 0, (0, 4, 0), F32)
    entry = Entry("w", "param", F32, (5, 6, 3), (chunk,))
    skeleton = single(entry)
    wanted = np.broadcast_to(np.arange(6, dtype="<f4")[:, None], (5, 6, 3)).tobytes()
    for read_bytes in (1, 8, 1 << 20):
        out = tmp_path / f"out{read_bytes}"
        out.mkdir()
        files = {chunk.file: SourceFile(chunk.file, 24)}
        planned = Plan({entry.key: entry}, skeleton)
        execute(planned, files, out, MoveOptions(read_bytes=read_bytes))
        assert (out / "o").read_bytes() == wanted


def test_what_is_held_for_several_copies_stays_within_the_read_limit(tmp_path):
    """Columns of wider matrices: most of what lies between the first and the last is others'."""
    rows, columns, wide, limit = 256, 96, 4, 16 << 10
    stored, chunks, files, known = [], [], [], {}
    for number in range(8):
        path, matrix = str(tmp_path / f"f{number}"), np.empty((rows, columns * wide // 8), "<f4")
        matrix.flat[:] = np.arange(matrix.size) + number * matrix.size
        matrix.tofile(path)
        known[path] = SourceFile(path, matrix.nbytes)
        stored.append(matrix[:, : columns // 8])
        box = Box((0, number * columns // 8), (rows, columns // 8))
        chunks.append(Chunk(box, path, 0, matrix.strides, F32))
    entry = Entry("w", "param", F32, (rows, columns), tuple(chunks))
    placed = []
    for number in range(6):
        box = Box((0, number * columns // 6), (rows, columns // 6))
        placed.append(Chunk(box, f"{number}", 0, row_major(box.shape, 4), F32))
        files.append(OutputFile(f"{number}", box.volume * 4))
    skeleton = Skeleton(tuple(files), (replace(entry, chunks=tuple(placed)),))
    planned, held = Plan({entry.key: entry}, skeleton, limit), 0
    with SourceFiles() as pool:
        filler = Filler(pool, read_bytes=limit, needs_checksum=lambda _file: False)
        for batch in planned.batches():
            filler.read_shared(copy for window in batch for copy in window.copies)
            held = max(held, sum(len(data) for *_, data in filler._shared))
    assert 0 < held <= limit
    (tmp_path / "out").mkdir()
    execute(planned, known, tmp_path / "out", MoveOptions(read_bytes=limit))
    for chunk in placed:
        wanted = np.hstack(stored)[:, chunk.box.origin[1] :][:, : columns // 6]
        assert (tmp_path / "out" / chunk.file).read_bytes() == wanted.tobytes()


class Faulty:
    """A disk that keeps another byte than it was given, in one of its writes."""

    def __init__(self, number: int, at: float) -> None:
        self.number, self.at, self.writes = number, at, 0

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        kept = bytearray(data)
        if self.writes == self.number:
            kept[int(self.at * len(kept))] ^= 16
        self.writes += 1
        return PWRITE(descriptor, kept, offset)


PWRITE = os.pwrite


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_module(tmp_path_factory, "reshard.system._reads")


@pytest.mark.parametrize(
    ("workers", "is_compiled", "read_bytes"),
    [(1, True, 100), (3, True, 4 << 20), (3, False, 100), (1, False, 4 << 20)],
)
def test_a_byte_that_was_not_kept_is_seen_at_once(
    tmp_path, monkeypatch, built, workers, is_compiled, read_bytes
):
    """Of headers, of runs, of what is woven together: of every write that there is."""
    monkeypatch.setattr(output_files, "_reads", built if is_compiled else None)
    made = scene(tmp_path / "in", 7)
    skeleton = whole_target(made)
    options = {"window_bytes": 300, "workers": workers, "read_bytes": read_bytes}
    whole_disk = Faulty(-1, 0)
    monkeypatch.setattr(os, "pwrite", whole_disk.pwrite)
    run(made, skeleton, tmp_path / "out", **options)
    assert whole_disk.writes > 20
    chance = random.Random(1)
    for number in range(whole_disk.writes):
        faulty = Faulty(number, chance.random())
        monkeypatch.setattr(os, "pwrite", faulty.pwrite)
        with pytest.raises(DifferentError, match="differ from what was written"):
            run(made, skeleton, tmp_path / f"out{number}", **options)


def test_the_module_compares_any_length(tmp_path, built):
    data = bytes(range(256)) * 3
    (tmp_path / "x").write_bytes(b"head" + data)
    with OpenFiles(os.O_RDONLY) as pool:
        number = pool.open(str(tmp_path / "x")).number
        for piece in (bytearray(1), bytearray(100), bytearray(1000)):
            assert built.equals(number, 4, data, piece) is True
            assert built.equals(number, 4, b"", piece) is True
            assert built.equals(number, 4, data[:-1] + b"x", piece) is False
            assert built.equals(number, 4, data + b"x", piece) is None
            assert built.equals(-1, 4, data, piece) is None
        assert built.equals(number, 4, data, bytearray()) is None


def test_without_verify_nothing_is_read_back(tmp_path, monkeypatch):
    made = scene(tmp_path / "in", 7)
    skeleton = whole_target(made)
    monkeypatch.setattr(os, "pwrite", Faulty(3, 0.5).pwrite)
    (tmp_path / "out").mkdir()
    planned = Plan(made.entries, skeleton)
    execute(planned, made.files(), tmp_path / "out", MoveOptions(verify=False))


@pytest.mark.parametrize("workers", [1, 4])
def test_a_source_that_shrinks_is_corrupt(tmp_path, workers):
    made = scene(tmp_path / "in", 8)
    files = made.files()
    for number, (path, source) in enumerate(files.items()):
        Path(path).write_bytes(Path(path).read_bytes()[: source.nbytes // 2])
        with pytest.raises(CorruptError, match="shorter") as caught:
            run(made, whole_target(made), tmp_path / f"out{number}", workers=workers, files=files)
        assert caught.value.where == path
        made.files()


def test_a_source_that_vanishes_is_incomplete(tmp_path):
    made = scene(tmp_path / "in", 8)
    files = made.files()
    gone = Path(next(iter(files)))
    gone.unlink()
    with pytest.raises(IncompleteError, match=gone.name):
        run(made, whole_target(made), tmp_path / "out", workers=2, files=files)


def test_progress_counts_every_output_byte_once(tmp_path):
    made = scene(tmp_path / "in", 10)
    skeleton = whole_target(made)
    (tmp_path / "out").mkdir()
    planned = Plan(made.entries, skeleton, 100)
    for workers in (1, 3):
        seen = []
        out = tmp_path / f"out{workers}"
        out.mkdir()
        options = MoveOptions(workers=workers, progress=seen.append)
        execute(planned, made.files(), out, options)
        assert sum(seen) == sum(entry.nbytes for entry in made.entries.values())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_take_batches_of_different_files_in_turn(workers):
    batches = [(Window(file, at, 1, ()),) for file in "abc" for at in range(4)]
    taken = [
        (window.file, window.byte_offset)
        for (window,) in distribution.interleave_files(batches, workers)
    ]
    assert sorted(taken) == [(window.file, window.byte_offset) for (window,) in batches]
    for file in "abc":
        assert [at for name, at in taken if name == file] == [0, 1, 2, 3]
    assert len({file for file, _ in taken[:workers]}) == workers


def test_a_file_of_more_batches_than_are_held_goes_through_in_order(monkeypatch):
    monkeypatch.setattr(distribution, "_LOOKAHEAD", 3)
    batches = [(Window(file, at, 1, ()),) for file in "ab" for at in range(10)]
    seen = []

    def planned():
        for batch in batches:
            seen.append(batch)
            yield batch

    for number, batch in enumerate(distribution.interleave_files(planned(), 2), start=1):
        assert len(seen) <= number + 3, batch
    assert len(seen) == number == 20
