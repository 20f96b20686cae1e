"""Checksums on the way through: those of sources are compared, those of targets are written."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reshard.core import dtypes
from reshard.core.box import Box, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.manifest import Entry, Record, SourceFile, StoredChecksum
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan
from reshard.errors import CorruptError
from tests.support.directories import read_files
from tests.support.random_checkpoints import expected, run, scene, single, whole_target

F32 = dtypes.FLOAT32


class Interleaved:
    """One record of 600 float32, of which strided views and a block are tensors."""

    lead, tail = 13, 29

    def __init__(self, directory: Path, *, stored: int | None = None) -> None:
        self.path = directory / "source"
        data = random.Random(9).randbytes(self.lead + 2400 + self.tail)
        self.values = np.frombuffer(data, "<u4", 600, self.lead)
        self.path.write_bytes(b"left" + data + b"right")
        self.start = 4
        self.nbytes = len(data)
        crc = zlib.crc32(data) if stored is None else stored
        records = (Record(self.start, self.nbytes, crc, "data/0"),)
        self.files = {str(self.path): SourceFile(str(self.path), 9 + len(data), records)}

    def view(self, name, first, shape, strides):
        strides = tuple(4 * s for s in strides)
        at = self.start + self.lead + 4 * first
        chunk = Chunk(whole(shape), str(self.path), at, strides, F32)
        return Entry(name, "param", F32, shape, (chunk,))

    def views(self):
        return [
            self.view("even", 0, (300,), (2,)),
            self.view("odd", 1, (300,), (2,)),
            self.view("column", 7, (20, 2), (30, 1)),
            self.view("turned", 3, (5, 20), (1, 7)),
            self.view("block", 100, (50,), (1,)),
        ]

    def run(self, out, entries, **options):
        out.mkdir()
        skeleton = single(*entries)
        planned = Plan({e.key: e for e in entries}, skeleton, options.pop("window_bytes", 256))
        return execute(planned, self.files, out, MoveOptions(**options))


SUBSETS = [(0,), (1,), (4,), (3, 2), (0, 1), (2, 4), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("chosen", SUBSETS)
@pytest.mark.parametrize(("workers", "read_bytes"), [(1, 4 << 20), (3, 50), (2, 4)])
def test_right_checksum_of_a_partly_read_record_is_accepted(tmp_path, chosen, workers, read_bytes):
    made = Interleaved(tmp_path)
    entries = [made.views()[i] for i in chosen]
    made.run(tmp_path / "out", entries, workers=workers, read_bytes=read_bytes)
    data = (tmp_path / "out" / "o").read_bytes()
    assert len(data) == sum(entry.nbytes for entry in entries)
    if 0 in chosen:
        assert data[:1200] == made.values[::2].tobytes()


@pytest.mark.parametrize("chosen", SUBSETS)
def test_any_flipped_byte_of_a_used_record_is_seen(tmp_path, chosen):
    made = Interleaved(tmp_path)
    entries = [made.views()[i] for i in chosen]
    data = made.path.read_bytes()
    for number, at in enumerate((0, 5, 12, 13, 500, 1213, 2412, 2413, 2441)):
        flipped = bytearray(data)
        flipped[made.start + at] ^= 1 << (at % 8)
        made.path.write_bytes(flipped)
        with pytest.raises(CorruptError, match=r"data/0 .*CRC-32") as caught:
            made.run(tmp_path / f"out{number}", entries, workers=1 + number % 3)
        assert caught.value.where == str(made.path)
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("at", [0, 3, -1, -5])
def test_a_flipped_byte_outside_every_record_is_nobodys_business(tmp_path, at):
    made = Interleaved(tmp_path)
    data = bytearray(made.path.read_bytes())
    data[at] ^= 255
    made.path.write_bytes(data)
    made.run(tmp_path / "out", made.views())
    assert (tmp_path / "out" / "o").stat().st_size == sum(e.nbytes for e in made.views())


def test_a_wrong_stored_checksum_is_refused_even_when_it_is_zero(tmp_path):
    for number, stored in enumerate((0, 1, 0xFFFFFFFF)):
        made = Interleaved(tmp_path, stored=stored)
        with pytest.raises(CorruptError, match="CRC-32"):
            made.run(tmp_path / f"out{number}", made.views()[4:])


@pytest.mark.parametrize("seed", range(6))
def test_every_record_of_a_random_checkpoint_is_checked(tmp_path, seed):
    made = scene(tmp_path / "in", seed, layouts=("flat", "rows", "columns", "grid", "whole"))
    skeleton = whole_target(made)
    files = made.files()
    chance = random.Random(seed)
    used = [
        (path, r.byte_offset, r.nbytes)
        for path, source in files.items()
        for r in source.records
        if any(
            r.byte_offset <= chunk.byte_offset < r.byte_offset + r.nbytes
            for entry in made.entries.values()
            for chunk in entry.chunks
            if chunk.file == path and chunk.box.volume
        )
    ]
    for number in range(4):
        path, start, nbytes = chance.choice(used)
        whole_file = Path(path).read_bytes()
        flipped = bytearray(whole_file)
        flipped[start + chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
        Path(path).write_bytes(flipped)
        with pytest.raises(CorruptError, match="CRC-32"):
            run(made, skeleton, tmp_path / f"out{number}", window_bytes=200, files=files)
        Path(path).write_bytes(whole_file)
    run(made, skeleton, tmp_path / "out", window_bytes=200, files=files)
    assert read_files(tmp_path / "out") == expected(made, skeleton)


def test_records_that_touch_are_checked_one_by_one(tmp_path):
    """A run of two ranks' pieces is one read; it crosses the border of their records."""
    path = tmp_path / "source"
    data = random.Random(1).randbytes(800)
    halves = [contiguous(str(path), 400 * i, F32, Box((100 * i,), (100,))) for i in range(2)]
    entry = Entry("w", "param", F32, (200,), tuple(halves))
    records = tuple(
        Record(400 * i, 400, zlib.crc32(data[400 * i : 400 * i + 400]), f"data/{i}")
        for i in range(2)
    )
    files = {str(path): SourceFile(str(path), 800, records)}
    skeleton = single(entry)
    for number, at in enumerate((None, 10, 399, 400, 799)):
        flipped = bytearray(data)
        if at is not None:
            flipped[at] ^= 4
        path.write_bytes(flipped)
        out = tmp_path / f"out{number}"
        out.mkdir()
        planned = Plan({entry.key: entry}, skeleton)
        if at is None:
            execute(planned, files, out, MoveOptions())
            assert (out / "o").read_bytes() == data
        else:
            with pytest.raises(CorruptError, match=f"data/{at // 400} "):
                execute(planned, files, out, MoveOptions())


@pytest.mark.parametrize("gap", [4, 0])
@pytest.mark.parametrize("window_bytes", [1, 64, 1 << 20])
def test_stored_checksums_are_written_where_the_format_wants_them(tmp_path, gap, window_bytes):
    made = scene(tmp_path / "in", 9, shapes=((40, 7), (3,), (), (2, 3)))
    base = single(*made.entries.values(), gap=gap)
    size = base.files[0].nbytes
    data = [(c.byte_offset, e.nbytes) for e in base.entries for c in e.chunks]
    checksums = tuple(
        StoredChecksum(at, nbytes, (size + 8 * i, size + 8 * i + 4))
        for i, (at, nbytes) in enumerate(data)
    )
    file = replace(base.files[0], nbytes=size + 32, checksums=checksums)
    skeleton = replace(base, files=(file,))
    run(made, skeleton, tmp_path / "out", window_bytes=window_bytes, workers=2)
    content = (tmp_path / "out" / "o").read_bytes()
    for i, (at, nbytes) in enumerate(data):
        crc = zlib.crc32(content[at : at + nbytes]).to_bytes(4, "little")
        assert content[size + 8 * i :][:8] == crc * 2
