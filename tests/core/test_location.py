"""Places: one directory, a file of one, or several that hold parts of one; and run directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import reshard
from reshard.core.location import Location
from reshard.errors import (
    CorruptError,
    IncompleteError,
    ReshardError,
    UnrecognisedError,
    UsageError,
)
from reshard.formats import adjacent_files, read


def write(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def save(path, value=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"w": torch.full((3,), float(value))}, "optimizer": {}}, path)


def weight(path, **options):
    with reshard.open(path, **options) as checkpoint:
        return checkpoint["w"][0].item()


def test_files_and_folders_of_several_directories(tmp_path):
    write(tmp_path / "a" / "sub" / "1")
    write(tmp_path / "b" / "sub" / "2")
    write(tmp_path / "b" / "top")
    location = Location.from_paths([tmp_path / "a", tmp_path / "b"])
    assert list(location.files) == ["top"]
    assert list(location.folders["sub"].files) == ["1", "2"]
    assert location.find_nested("sub/2") == tmp_path / "b" / "sub" / "2"


def test_a_file_in_both_directories_must_be_the_same(tmp_path):
    write(tmp_path / "a" / "model.pt", b"one")
    write(tmp_path / "b" / "model.pt", b"one")
    write(tmp_path / "a" / "train.log", b"of one node")
    write(tmp_path / "b" / "train.log", b"of the other")
    assert len(Location.from_paths([tmp_path / "a", tmp_path / "b"]).files) == 2
    write(tmp_path / "b" / "model.pt", b"two")
    with pytest.raises(CorruptError, match="which has the same name") as refused:
        _ = Location.from_paths([tmp_path / "a", tmp_path / "b"]).files
    assert f"(rank_0, rank_1 ...), pass {tmp_path}; otherwise" in str(refused.value)


def test_several_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="directories"):
        Location.from_paths([write(tmp_path / "a"), write(tmp_path / "b")])


def test_nowhere(tmp_path):
    with pytest.raises(UnrecognisedError, match="does not exist"):
        Location.from_paths([tmp_path / "a"])


def test_the_newest_numbered_checkpoint_is_taken(tmp_path):
    for number in (9, 10, 100):
        save(tmp_path / f"checkpoint-{number}" / "optimizer.pt", number)
    assert weight(tmp_path) == 100
    assert weight(tmp_path, tag="9") == 9
    assert weight(tmp_path, tag="checkpoint-10") == 10


def test_a_newest_one_that_is_none_is_not_passed_over(tmp_path):
    save(tmp_path / "checkpoint-9" / "optimizer.pt")
    write(tmp_path / "checkpoint-10" / "notes.txt")
    with pytest.raises(UnrecognisedError):
        read(tmp_path)


def test_a_pointer_goes_before_the_number(tmp_path):
    for number in (3, 4):
        save(tmp_path / f"global_step_{number}" / "actor" / "optim.pt", number)
    write(tmp_path / "latest_checkpointed_iteration.txt", b"3")
    assert weight(tmp_path) == 3


def test_actor_and_critic_are_two_checkpoints(tmp_path):
    for name in ("actor", "critic"):
        save(tmp_path / "global_step_1" / name / "optim.pt")
    with pytest.raises(UnrecognisedError, match="several") as caught:
        read(tmp_path)
    assert "critic" in caught.value.problem


def test_accelerates_automatic_names(tmp_path):
    for number in (0, 1):
        save(tmp_path / "checkpoints" / f"checkpoint_{number}" / "optimizer.bin", number)
    assert weight(tmp_path) == 1


def test_an_unknown_tag(tmp_path):
    save(tmp_path / "checkpoint-9" / "optimizer.pt")
    with pytest.raises(UnrecognisedError):
        read(tmp_path, tag="8")


def test_a_missing_rank_between_others(tmp_path):
    for rank in (0, 2):
        save(tmp_path / f"model_rank{rank}.pt")
    with pytest.raises(IncompleteError, match=r"model_rank1\.pt is missing"):
        read(tmp_path)


def test_a_missing_rank_of_a_stated_world(tmp_path):
    for rank in (0, 1):
        save(tmp_path / f"model_world_size_4_rank_{rank}.pt")
    with pytest.raises(IncompleteError, match=r"rank_2\.pt, .*rank_3\.pt are missing"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("global_step10", "did you mean {0}/global_step100?"),
        ("global_step10/deeper", "did you mean {0}/global_step100?"),
        ("other", "{0} contains no other; it contains global_step100"),
    ],
)
def test_a_path_that_does_not_exist_gets_advice(tmp_path, asked, remedy):
    (tmp_path / "global_step100").mkdir()
    with pytest.raises(UnrecognisedError) as caught:
        Location.from_paths([tmp_path / asked])
    assert caught.value.remedy == remedy.format(tmp_path)


def test_a_relative_path_that_does_not_exist_is_told_to_what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnrecognisedError) as caught:
        Location.from_paths([Path("run")])
    assert str(tmp_path) in caught.value.remedy


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnrecognisedError) as caught:
        Location.from_paths([Path("org/model-7B")])
    assert "download it (hf download org/model-7B)" in caught.value.remedy


def test_no_path_at_all():
    with pytest.raises(UsageError, match="the list of paths is empty"):
        Location.from_paths([])


def test_an_empty_name_of_a_base_model_is_no_path(tmp_path):
    write(tmp_path / "adapter_config.json", b'{"base_model_name_or_path": ""}')
    assert adjacent_files.find_model(Location.from_paths([tmp_path]), None) is None


@pytest.mark.parametrize("asked", ["link", "link/deeper"])
def test_a_symlink_to_nothing_is_named(tmp_path, asked):
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(UnrecognisedError) as caught:
        Location.from_paths([tmp_path / asked])
    assert "link is a symlink to gone, which does not exist" in str(caught.value).replace(
        ": is", " is"
    )


def test_a_symlink_to_itself_is_no_file(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "there").symlink_to(tmp_path)
    location = Location.from_paths([tmp_path])
    assert list(location.files) == ["a", "link"]
    assert list(location.folders) == ["there"]
    assert location.broken_links == {"loop": tmp_path / "loop"}


@pytest.fixture
def deny(monkeypatch):
    """Return a function that makes a directory one whose names this user may not read."""
    listed = os.scandir

    def deny(denied):
        def list_others(path):
            if path == denied:
                raise PermissionError(13, "Permission denied", str(path))
            return listed(path)

        monkeypatch.setattr(os, "scandir", list_others)

    return deny


def test_the_directory_above_a_checkpoint_may_be_unreadable(tmp_path, deny):
    save(tmp_path / "run" / "model.pt", 2)
    deny(tmp_path)
    assert weight(tmp_path / "run") == 2


def test_an_unreadable_checkpoint_of_a_run_is_not_called_interrupted(tmp_path, deny):
    for step in (1, 2):
        save(tmp_path / f"step-{step}" / "model.pt")
    (tmp_path / "latest").write_text("step-2")
    deny(tmp_path / "step-2")
    with pytest.raises(ReshardError, match="step-2: cannot be read\n  -> request read permission"):
        read(tmp_path)
