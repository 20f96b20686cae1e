"""The fsspec file system of a run of real DeepSpeed, read by programs that take a file system."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import reshard
from reshard.errors import CorruptError, UsageError
from reshard.filesystem import CheckpointFileSystem
from tests.support.sample_tensors import same

SOURCE = "hf_z3_tied"


@pytest.fixture(autouse=True)
def registered():
    """Register the file system: an editable install of an older version lacks the entry point."""
    fsspec.register_implementation("reshard", CheckpointFileSystem, clobber=True)


@pytest.fixture
def run(made):
    return made / SOURCE / "run"


def test_the_files_are_those_of_merge(run, tmp_path):
    reshard.merge(run, tmp_path / "merged")
    files = fsspec.filesystem("reshard", fo=str(run))
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert set(files.ls("", detail=False)) == set(wanted)
    for name, data in wanted.items():
        assert files.cat_file(name) == data
        assert files.cat_file(name, start=3, end=50) == data[3:50]
        info = files.info(name)
        assert (info["name"], info["size"], info["type"]) == (name, len(data), "file")
    with fsspec.open(f"reshard://config.json::{run}") as file:
        assert file.read() == wanted["config.json"]
    files.close()


def test_what_identifies_a_file_changes_with_the_source(tmp_path):
    def identify():
        files = fsspec.filesystem("reshard", fo=str(tmp_path / "x.safetensors"))
        name = "model.safetensors"
        found = files.ukey(name), files.checksum(name), files.modified(name)
        files.close()
        return found

    found = []
    for value in (1.0, 2.0):
        save_file({"a": torch.full((4,), value)}, tmp_path / "x.safetensors")
        found.append(identify())
        assert identify() == found[-1]
    assert all(one != other for one, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_loads_a_layout_that_is_nowhere(run, tmp_path):
    reshard.split(run, tmp_path / "dcp", to="dcp", world_size=2)
    written = dcp.FileSystemReader(tmp_path / "dcp")
    shapes = {
        key: value
        for key, value in written.read_metadata().state_dict_metadata.items()
        if isinstance(value, dcp.metadata.TensorStorageMetadata)
    }
    states = [
        {key: torch.zeros(each.size, dtype=each.properties.dtype) for key, each in shapes.items()}
        for _ in range(2)
    ]
    live = FsspecReader("reshard://", fo=str(run), to="dcp", world_size=2)
    for state, reader in zip(states, (written, live), strict=True):
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert len(shapes) > 50
    for key in shapes:
        assert same(states[0][key], states[1][key]), key


def test_missing_folders_and_names_are_errors(run):
    files = fsspec.filesystem("reshard", fo=str(run), to="deepspeed")
    (tag,) = (each["name"] for each in files.ls("") if each["type"] == "directory")
    assert files.isdir(tag)
    assert all(name.startswith(f"{tag}/") for name in files.ls(tag, detail=False))
    for look in (files.info, files.ls, files.open):
        with pytest.raises(FileNotFoundError):
            look("nothing")
    with pytest.raises(UsageError, match="read-only"):
        files.open("latest", "wb")
    with pytest.raises(UsageError, match="does not name a checkpoint"):
        fsspec.filesystem("reshard")


def test_a_damaged_source_is_an_error_at_the_end_of_a_file(copied):
    run = copied(SOURCE)
    files = fsspec.filesystem("reshard", fo=str(run))
    for path in run.rglob("*_optim_states.pt"):
        os.truncate(path, 100)
    with pytest.raises(CorruptError):
        files.cat_file("model.safetensors")


def test_the_protocol_is_declared():
    declared = {each.name: each.value for each in entry_points(group="fsspec.specs")}
    assert declared.get("reshard", "reshard.filesystem:CheckpointFileSystem").startswith("reshard.")
