"""Text becomes a local path or the URL of an object, never one instead of the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import reshard
from reshard.errors import UsageError
from reshard.paths import as_path, is_remote


def test_a_url_becomes_a_remote_path_and_other_text_a_local_one():
    path = as_path("s3://bucket/run/file.pt")
    assert (str(path), path.name, path.suffix) == ("s3://bucket/run/file.pt", "file.pt", ".pt")
    assert str(path.parent / "other") == "s3://bucket/run/other"
    assert as_path(Path("s3://bucket/run/file.pt")) == path == as_path(path)
    assert is_remote(str(path))
    assert as_path("file:///a/b") == Path("/a/b")
    assert type(as_path("a/b:c")) is type(Path("a/b:c"))
    assert as_path(Path("/a")) == Path("/a")


@pytest.mark.parametrize("use", [os.stat, open, os.listdir, Path.unlink, os.fspath])
def test_a_url_cannot_be_used_as_a_local_file(use):
    with pytest.raises(UsageError, match="s3://bucket/run"):
        use(as_path("s3://bucket/run"))


def test_a_url_joined_to_an_absolute_path_is_refused():
    with pytest.raises(UsageError, match="is a local path"):
        (as_path("s3://bucket/run") / "/etc/passwd").exists()


def test_an_unknown_scheme_is_refused():
    with pytest.raises(UsageError, match="nosuch://"):
        reshard.inspect("nosuch://a/b")
