"""A source that changes after its header was read ends in an error, never in other values."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reshard
import reshard.dcp
from reshard.commands import output
from reshard.errors import CorruptError
from reshard.live.files import open_live_files
from reshard.system import files, versions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
CHANGED = r"was modified or replaced while it was read"
NAMES = ("a", "b")


def save(path, kind, value):
    """Save a checkpoint whose weights have one value."""
    state = {name: torch.full((64, 1024), value + n) for n, name in enumerate(NAMES)}
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path, no_dist=True)


def list_files(path):
    return sorted(path.rglob("*")) if path.is_dir() else [path]


def write_in_place(old, new):
    with old.open("r+b") as file:
        file.write(new.read_bytes())
        file.truncate()


def write_and_restore_time(old, new):
    times = old.stat().st_atime_ns, old.stat().st_mtime_ns
    write_in_place(old, new)
    os.utime(old, ns=times)


def replace_and_restore_time(old, new):
    os.utime(new, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    new.chmod(0o600)
    new.replace(old)


def truncate(old, _new):
    os.truncate(old, old.stat().st_size - 1000)


BY_RENAME = (Path.rename, lambda old, new: new.replace(old), replace_and_restore_time)
IN_PLACE = (write_in_place, write_and_restore_time, truncate)


@pytest.fixture(params=["safetensors", "torch", "dcp"])
def saved(request, tmp_path):
    """Return the path of a checkpoint and a function that changes all of its files."""
    suffix = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ""}[request.param]
    path, other = tmp_path / f"run{suffix}", tmp_path / f"other{suffix}"
    save(path, request.param, 1.0)
    save(other, request.param, 5.0)

    def change(how):
        for old, new in zip(list_files(path), list_files(other), strict=True):
            if not (old.name == ".metadata" and how is truncate):
                how(old, new)

    return path, change


def read_lazily(path, change):
    with reshard.open(path) as checkpoint:
        change()
        return {name: checkpoint[name][...] for name in NAMES}


def read_state_dict(path, change):
    with reshard.open(path) as checkpoint:
        change()
        return checkpoint.state_dict()


def load_dcp(path, change):
    reader = reshard.dcp.StorageReader(path)
    change()
    state = {name: torch.zeros(64, 1024) for name in NAMES}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def read_opened_files(path, change):
    with reshard.open_files(path) as opened:
        change()
        return opened.open("model.safetensors").read()


def read_with_fsspec(path, change):
    opened = fsspec.filesystem("reshard", fo=str(path))
    change()
    return opened.cat_file("model.safetensors")


def read_live_files(path, change):
    options = reshard.SplitOptions(to="dcp", world_size=1)
    with open_live_files(path, options) as live:
        change()
        return live.files.open("__0_0.distcp").read()


CONSUMERS = (
    *(read_lazily, read_state_dict, load_dcp),
    *(read_opened_files, read_with_fsspec, read_live_files),
)


@pytest.mark.parametrize("how", [*IN_PLACE, *BY_RENAME[1:]])
@pytest.mark.parametrize("read", CONSUMERS)
def test_no_reader_gives_values_of_another_save(saved, read, how):
    path, change = saved
    with pytest.raises((CorruptError, dcp.api.CheckpointException), match=CHANGED):
        read(path, lambda: change(how))


@pytest.mark.parametrize("how", [*IN_PLACE, *BY_RENAME[1:]])
@pytest.mark.parametrize("command", [reshard.merge, reshard.split])
def test_no_output_is_written_from_another_save(saved, command, how, tmp_path, monkeypatch):
    path, change = saved
    write = output.write
    monkeypatch.setattr(output, "write", lambda *args: (change(how), write(*args))[1])
    options = {"to": "dcp", "world_size": 2} if command is reshard.split else {}
    with pytest.raises(CorruptError, match=CHANGED):
        command(path, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["diff", "verify"])
def test_no_verdict_is_about_two_saves(saved, command, monkeypatch):
    path, change = saved
    module = importlib.import_module(
        f"reshard.commands.{command}".replace("verify", "verify.command")
    )
    name = {"diff": "_compare", "verify": "run_deep_checks"}[command]
    act = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (change(write_and_restore_time), act(*args))[1])
    with pytest.raises(CorruptError, match=CHANGED):
        reshard.diff(path, path) if command == "diff" else reshard.verify(path, deep=True)


@pytest.mark.parametrize("how", BY_RENAME)
def test_an_open_file_may_be_renamed_or_replaced_by_rename(saved, how):
    path, change = saved
    with reshard.open(path) as checkpoint:
        first = checkpoint.state_dict()
        change(how)
        again = checkpoint.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in NAMES)


@pytest.mark.parametrize("how", IN_PLACE)
def test_an_open_file_may_not_be_rewritten(saved, how):
    path, change = saved
    with reshard.open(path) as checkpoint:
        checkpoint.state_dict()
        change(how)
        with pytest.raises(CorruptError, match=f"{CHANGED}|became shorter"):
            checkpoint["a"][...]


def test_what_changes_no_byte_is_no_error(saved, tmp_path, monkeypatch):
    path, change = saved

    def touch(old, _new):
        old.read_bytes()  # its access time
        old.chmod(0o640)
        os.link(old, tmp_path / f"{old.name}.link")

    assert read_lazily(path, lambda: change(touch))["b"][0, 0] == 2
    with reshard.open(path) as checkpoint:
        checkpoint["a"][...]
        change(lambda old, _: ((tmp_path / f"{old.name}.link").unlink(), old.chmod(0o600)))
        assert checkpoint["b"][0, 0] == 2
    write = output.write
    monkeypatch.setattr(output, "write", lambda *args: (change(touch), write(*args))[1])
    reshard.merge(path, tmp_path / "out")


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path):
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "model.safetensors", "safetensors", value)
    link = tmp_path / "latest"
    link.symlink_to("one")

    def lead_elsewhere():
        link.unlink()
        link.symlink_to("two")

    with pytest.raises(CorruptError, match=CHANGED):
        read_lazily(link, lead_elsewhere)


def test_only_fuse_may_give_a_file_another_inode_number(tmp_path, monkeypatch):
    save(tmp_path / "x.pt", "torch", 1.0)
    before = files.find_version(tmp_path / "x.pt")
    other = versions.replace(before, inode=(before.inode[0], before.inode[1] + 1))
    assert before.find_change(other)
    place = f"{os.major(before.inode[0])}:{os.minor(before.inode[0])}"
    (tmp_path / "mounts").write_text(f"36 35 {place} / /mnt rw - fuse.sshfs host: rw")
    monkeypatch.setattr(versions, "_MOUNTS", tmp_path / "mounts")
    assert not before.find_change(other)


def test_a_file_is_checked_when_the_pool_closes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_OPEN", 1)
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(b"0123")
    with files.SourceFiles() as pool:
        pool.read(str(tmp_path / "x"), 0, 4)
        (tmp_path / "x").write_bytes(b"4567")
        with pytest.raises(CorruptError, match=f"x.*{CHANGED}"):
            pool.read(str(tmp_path / "y"), 0, 4)


def test_another_machine_compares_size_and_modification_time(tmp_path):
    save(tmp_path / "x.safetensors", "safetensors", 1.0)
    with reshard.open(tmp_path / "x.safetensors") as checkpoint:
        sent = pickle.loads(pickle.dumps(checkpoint.manifest))
    copy = tmp_path / "copy"
    shutil.copy2(tmp_path / "x.safetensors", copy)  # other inode and ctime
    copy.replace(tmp_path / "x.safetensors")
    read = reshard.Checkpoint(sent)
    assert read["b"][0, 0] == 2
    os.utime(tmp_path / "x.safetensors", ns=(0, 0))
    with pytest.raises(CorruptError, match="header rank 0 has read: it has another modification"):
        reshard.Checkpoint(sent)["b"][...]
    read.close()
