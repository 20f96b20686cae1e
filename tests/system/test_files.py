"""Reads of local files that are announced to the system before they are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard.system.files import SourceFiles


@pytest.fixture
def announced(monkeypatch):
    """Return the byte ranges that the system was told of."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda _number, offset, nbytes, _advice: ranges.append((offset, nbytes)),
    )
    return ranges


def test_ranges_are_announced_in_the_order_of_their_files(tmp_path, announced):
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    for path in (first, second):
        Path(path).touch()
    with SourceFiles() as pool:
        asked = [(second, 7, 1), (first, 20 << 20, 4), (first, 4096, 8), (first, 0, 8)]
        assert pool.prefetch(asked) == []  # nothing has to be dropped
    assert announced == [(0, 4104), (20 << 20, 4), (7, 1)]


def test_a_file_system_that_takes_no_advice_is_read_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with SourceFiles() as pool:
        pool.prefetch([(str(path), 1, 2)])
        assert pool.read(str(path), 1, 2) == b"bc"
