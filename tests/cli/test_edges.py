"""What lies at the edge of use: odd dtypes and names, no memory, no disk, no working directory."""

from __future__ import annotations

import _thread
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import reshard
from reshard.cli import main
from reshard.core import keys
from reshard.errors import IncompleteError, UnrecognisedError, UnsupportedError, UsageError

ODD = {
    "complex32": torch.float32,
    "bits8": torch.uint8,
    "bits16": torch.int16,
}


@pytest.fixture
def plain(tmp_path):
    save_file({"w": torch.ones(3000, 100)}, tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:ComplexHalf")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", [name for name in ODD if hasattr(torch, name)])
def test_a_dtype_that_is_not_supported_is_named(tmp_path, name, zipped):
    odd = torch.zeros(4, dtype=ODD[name]).view(getattr(torch, name))
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3), "odd": odd}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsupportedError, match=f"x.pt: contains a tensor of dtype torch.{name}"):
        reshard.inspect(path)
    if name == "complex32":
        dcp.save({"model": {"w": torch.ones(3), "odd": odd}}, checkpoint_id=tmp_path / "dcp")
        with pytest.raises(UnsupportedError, match=name):
            reshard.inspect(tmp_path / "dcp")


def test_a_file_of_no_tensors_is_sound_and_nothing_is_made_of_it(tmp_path):
    save_file({}, tmp_path / "x.safetensors")
    assert reshard.inspect(tmp_path / "x.safetensors").to_dict()["leaves"]["read"] == 0
    with pytest.raises(UnrecognisedError, match="is valid but contains no weights"):
        reshard.merge(tmp_path / "x.safetensors", tmp_path / "out.safetensors")
    with pytest.raises(UnrecognisedError, match="is valid but contains no weights"):
        reshard.split(tmp_path / "x.safetensors", tmp_path / "o", to="dcp", init_optimizer="none")


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out"])
def test_a_tensor_without_a_name_is_written(tmp_path, name):
    state = {"": torch.ones(3), "a": torch.zeros(2)}
    torch.save(state, tmp_path / "x.pt")
    reshard.merge(tmp_path / "x.pt", tmp_path / name)
    path = tmp_path / name / "model.safetensors" if name == "out" else tmp_path / name
    written = torch.load(path) if name.endswith(".pt") else load_file(path)
    assert {key: value.tolist() for key, value in written.items()} == {
        key: value.tolist() for key, value in state.items()
    }
    named = keys.Edits(rename=[("^$", "b")])
    reshard.merge(tmp_path / "x.pt", tmp_path / "named.safetensors", edits=named)
    assert load_file(tmp_path / "named.safetensors").keys() == {"a", "b"}
    with pytest.raises(UnsupportedError, match="an empty name"):
        reshard.split(tmp_path / "x.pt", tmp_path / "o", to="dcp", init_optimizer="none")


def test_a_system_without_memory_for_a_thread_is_no_bug(plain, tmp_path, monkeypatch, capsys):
    """What RLIMIT_AS comes to: CPython says that it cannot start a thread, and no more."""

    def refused(_run, _arguments):
        raise RuntimeError("can't start new thread")

    out = tmp_path / "out.safetensors"
    monkeypatch.setattr(_thread, "start_new_thread", refused)
    monkeypatch.setattr(sys, "argv", ["reshard", "merge", str(plain), str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    said = capsys.readouterr().err
    assert "out of memory" in said
    assert "nothing was written" in said
    assert not out.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_report_that_finds_no_place_says_that_the_output_is_whole(plain, tmp_path, form):
    out = tmp_path / "out.safetensors"
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "reshard", "merge", str(plain), str(out), *form]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert f"{out} was written completely before this" in done.stderr
    assert load_file(out).keys() == {"w"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["merge", "--help-all"]])
def test_a_help_text_that_finds_no_place_is_a_full_disk(words):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "reshard", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == "reshard: standard output: No space left on device\n"


def test_a_page_that_cannot_be_written_says_that_the_output_is_whole(plain, tmp_path, monkeypatch):
    def full(_path, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)  # the page alone is written so
    out = tmp_path / "out.safetensors"
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.merge(plain, out, html=tmp_path / "page.html")
    assert caught.value.exit_code == 4
    assert f"{out} was written completely before this" in caught.value.remedy
    assert out.exists()
    assert not (tmp_path / "page.html").exists()


def test_a_working_directory_that_was_deleted_is_told_of(plain, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && {sys.executable} -c"
    code = "from reshard.cli import main; main()"
    words = f"{script} '{code}' merge {plain} out.safetensors"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the working directory was deleted" in done.stderr
    assert "Traceback" not in done.stderr


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["model.safetensors", "x.pt", ".metadata", "__0_0.distcp"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    if name in (".metadata", "__0_0.distcp"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    (tmp_path / name).write_text(LFS_POINTER)
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(IncompleteError, match=f"{name}: is a pointer of Git LFS"):
            reshard.inspect(place)


def test_a_model_that_does_not_exist_is_refused_also_where_none_is_needed(plain, tmp_path):
    with pytest.raises(UsageError, match="is not a file, a directory or module"):
        reshard.merge(plain, tmp_path / "out", model="nope.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    not hasattr(dcp, "HuggingFaceStorageWriter"), reason="torch consolidates no shards yet"
)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("interrupted", ["before the index", "after the index"])
def test_an_interrupted_consolidation_is_advised_to_use_its_parts(tmp_path, interrupted):
    """Torch consolidates a model after all ranks have saved, which can take longer than a job."""
    state = {"a": torch.ones(3), "b": torch.zeros(4)}
    shards = {"a": 1, "b": 2}
    writer = dcp.HuggingFaceStorageWriter(
        tmp_path / "out", shards, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    (tmp_path / "out/model-00002-of-00002.safetensors").unlink()
    if interrupted == "before the index":
        (tmp_path / "out/model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteError) as caught:
        reshard.merge(tmp_path / "out", tmp_path / "model.safetensors")
    parts = tmp_path / "out/sharded"
    assert f"or pass {parts}" in caught.value.remedy
    reshard.merge(parts, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
