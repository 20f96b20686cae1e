"""Text becomes a local path or the URL of an object, never one instead of the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import UsageError
from reshard.system.paths import as_path, is_remote


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


@pytest.mark.parametrize("call", [reshard.inspect, lambda path: reshard.merge("run", path)])
def test_an_empty_path_is_not_the_working_directory(call, tmp_path, monkeypatch):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the path is empty"):
        call("")


def test_a_tilde_in_a_source_or_destination_is_explained(tmp_path, monkeypatch):
    run = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(2)}, run)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    with pytest.raises(UsageError) as source:
        reshard.inspect("~/x.safetensors")
    assert source.value.remedy.startswith(f"pass {run};")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as destination:
        reshard.merge(run, "~/out.safetensors")
    assert destination.value.remedy.startswith(f"pass {tmp_path / 'out.safetensors'};")
