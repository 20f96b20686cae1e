"""Every byte is read, in every layout: digests, checksums, counterparts and padding."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.checks.digests import SHA256, Digest
from reshard.checks.gaps import count_unexpected, find_gaps
from reshard.checks.scan import Counterpart, Task, find_chunk, scan, split_replicas
from reshard.core import dtypes
from reshard.core.box import index_of, whole
from reshard.core.chunks import contiguous
from reshard.core.manifest import Entry, Record, SourceFile
from reshard.layouts.partition import run_chunks
from reshard.system.files import SourceFiles
from tests.support import random_checkpoints


def scanned(tasks, files, *, workers=2, window_bytes=1 << 20):
    return scan(
        tasks,
        files,
        workers=workers,
        window_bytes=window_bytes,
        ahead_bytes=1 << 20,
        progress=lambda _nbytes: None,
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 3), window=st.integers(16, 4096))
def test_a_digest_does_not_depend_on_the_layout(tmp_path, seed, workers, window):
    made = random_checkpoints.scene(tmp_path / str(seed), seed)
    files = made.files()
    tasks = [
        Task(entry, digests=(Digest(SHA256, entry.dtype),))
        for entry in made.entries.values()
        if entry.numel
    ]
    found = scanned(tasks, files, workers=workers, window_bytes=window)
    for task in tasks:
        wanted = hashlib.sha256(made.values[task.entry.fqn].tobytes()).hexdigest()
        assert found.digests[task.entry.key] == {Digest(SHA256, task.entry.dtype): wanted}
    assert found.altered == []
    assert found.records == sum(len(file.records) for file in files.values())


@pytest.mark.parametrize("seed", range(6))
def test_any_byte_of_a_record_is_covered_by_its_checksum(tmp_path, seed):
    made = random_checkpoints.scene(tmp_path / "scene", seed)
    files = made.files()
    tasks = [Task(entry) for entry in made.entries.values()]
    for path, file in files.items():
        for record in file.records:
            if not record.nbytes:
                continue
            content = bytearray(Path(path).read_bytes())
            at = record.byte_offset + made.chance.randrange(record.nbytes)
            content[at] ^= 1 << made.chance.randrange(8)
            Path(path).write_bytes(content)
            assert scanned(tasks, files).altered == [(path, record)]
            content[at : at + 1] = made.contents[path][at : at + 1]
            Path(path).write_bytes(content)


def stored(tmp_path, name, tensor, fqn="w", kind="param"):
    """Return a tensor in a file of its own as an entry."""
    path = tmp_path / name
    path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    dtype = dtypes.BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    shape = tuple(tensor.shape)
    chunk = contiguous(str(path), 0, dtype, whole(shape))
    return Entry(fqn, kind, dtype, shape, (chunk,)), SourceFile(str(path), path.stat().st_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window_bytes", [64, 1 << 20])
def test_a_copy_is_the_cast_of_its_master(tmp_path, dtype, window_bytes):
    master = torch.randn(37, 11) * 100
    copy = master.to(dtype)
    wrong = copy.clone()
    wrong[20, 3] += 1
    wrong[30, 1] = float("inf")
    one, one_file = stored(tmp_path, "master", master, kind="master")
    for held, unequal in ((copy, 0), (wrong, 2)):
        two, two_file = stored(tmp_path, "copy", held)
        files = {file.path: file for file in (one_file, two_file)}
        found = scanned(
            [Task(one, (Counterpart("masters", two, examine=True),))],
            files,
            window_bytes=window_bytes,
        )
        assert sum(each.difference.count for each in found.unequal) == unequal
        for each in found.unequal:
            assert index_of(each.difference.first, one.shape) == (20, 3)
        assert found.facts[two.key].infinite == int(held.isinf().sum())
        assert found.facts[one.key].infinite == 0


def test_replicas_are_told_apart(tmp_path):
    values = torch.arange(24.0).reshape(4, 6)
    first, first_file = stored(tmp_path, "0", values)
    values[2, 1] = -1
    other, other_file = stored(tmp_path, "1", values)
    third, third_file = stored(tmp_path, "2", torch.arange(24.0).reshape(4, 6))
    entry = replace(first, chunks=first.chunks + other.chunks + third.chunks)
    counterparts = tuple(Counterpart("replicas", each) for each in split_replicas(entry))
    assert len(counterparts) == 2
    files = {file.path: file for file in (first_file, other_file, third_file)}
    (found,) = scanned([Task(entry, counterparts)], files).unequal
    assert found.counterpart.entry.chunks == other.chunks
    assert (found.difference.first, found.difference.count) == (13, 1)
    assert find_chunk(found.counterpart.entry, (2, 1)).file == other_file.path


def test_gaps_are_what_no_tensor_covers(tmp_path):
    flat = np.zeros(20, "<f4")
    flat[[2, 3, 4]] = 1  # a
    flat[8:14] = 2  # b
    flat[15] = 9  # in the padding
    path = tmp_path / "flat"
    path.write_bytes(b"head" + flat.tobytes())
    record = Record(4, 80, None, "data/0")
    file = SourceFile(str(path), 84, (record,))

    def entry(fqn, start, stop):
        shape = (stop - start,)
        piece = contiguous(str(path), 4, dtypes.FLOAT32, whole(flat.shape))
        chunks = run_chunks(piece, start, shape, 0, stop - start)
        return Entry(fqn, "master", dtypes.FLOAT32, shape, tuple(chunks))

    found = find_gaps([entry("b", 8, 14), entry("a", 2, 5)], {str(path): file})
    assert [(g.byte_offset, g.nbytes, g.fqn) for g in found] == [
        (4, 8, "a"),
        (24, 12, "a"),
        (60, 24, "b"),
    ]
    with SourceFiles() as pool:
        assert [count_unexpected(pool, gap, {bytes(4)}, 8) for gap in found] == [0, 0, 1]
        nine = np.float32(9).tobytes()
        assert count_unexpected(pool, found[-1], {bytes(4), nine}, 8) == 0
