"""Ranges of local files that are fetched before they are read."""

from __future__ import annotations

import errno
import os
import threading
import time
from math import inf
from pathlib import Path

import pytest

from reshard.errors import ReshardError
from reshard.system import threads
from reshard.system.files import Descriptor, Section, SourceFiles

_CONTENT = bytes(range(256)) * 1024


@pytest.fixture
def reads(monkeypatch):
    """Return the ranges (byte offset, nbytes) that files are read by."""
    ranges: list[tuple[int, int]] = []
    read = Descriptor.read

    def record(self, byte_offset, nbytes):
        ranges.append((byte_offset, nbytes))
        return read(self, byte_offset, nbytes)

    monkeypatch.setattr(Descriptor, "read", record)
    return ranges


def test_ranges_close_together_are_fetched_by_one_read(tmp_path, reads):
    path = str(tmp_path / "a")
    Path(path).write_bytes(_CONTENT)
    with SourceFiles() as pool:
        fetched = pool.prefetch([(path, 100_000, 8), (path, 20, 4), (path, 50, 6)])
        assert fetched == [(path, 20, 36), (path, 100_000, 8)]
        assert pool.prefetch([(path, 0, 0)]) == []  # a block without elements in a stream of DCP
        assert reads == [(20, 36), (100_000, 8)]
        assert pool.read(path, 51, 3) == _CONTENT[51:54]
        target = bytearray(8)
        pool.read_into(path, 100_000, memoryview(target))
        assert target == _CONTENT[100_000:100_008]
        assert len(reads) == 2
        pool.drop(fetched)
        assert pool.read(path, 51, 3) == _CONTENT[51:54]
        assert reads[2:] == [(51, 3)]


def test_reads_that_wait_are_in_flight_together(tmp_path, monkeypatch):
    path, active, most = str(tmp_path / "a"), 0, 0
    Path(path).write_bytes(_CONTENT)
    read, lock = Descriptor.read, threading.Lock()

    def wait(self, byte_offset, nbytes):
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        time.sleep(0.01)
        with lock:
            active -= 1
        return read(self, byte_offset, nbytes)

    monkeypatch.setattr(Descriptor, "read", wait)
    with SourceFiles() as pool:
        asked = [(path, start, 8) for start in range(0, len(_CONTENT), 8192)]
        assert pool.prefetch(asked) == asked
    assert most > 4


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_few_reads_are_made_together_only_where_they_wait(tmp_path, monkeypatch, is_slow):
    path, asked = tmp_path / "a", []
    path.write_bytes(_CONTENT)
    monkeypatch.setattr(threads._Waits, "known_until", inf if is_slow else 0.0)
    monkeypatch.setattr(SourceFiles, "prefetch", lambda _, ranges: asked.append([*ranges]) or [])
    with SourceFiles() as pool:
        archive = Section(pool, str(path), 0, len(_CONTENT))
        archive.prefetch([(50_000, 8)])
        assert archive.read(50_000, 8) == _CONTENT[50_000:50_008]
    assert [len(ranges) for ranges in asked] == ([2, 1] if is_slow else [])


def test_a_file_whose_status_cannot_be_read_is_named(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # removed on the server of NFS

    path = tmp_path / "a"
    path.write_bytes(_CONTENT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(ReshardError, match="a: cannot be read: Stale"):
            SourceFiles().read(str(path), 0, 1)
