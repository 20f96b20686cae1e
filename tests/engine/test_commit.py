"""Output appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from reshard.engine.output import commit
from reshard.engine.output.destination import check_destination
from reshard.engine.output.temporary import temporary
from reshard.errors import ExistsError, ReshardError, ResourceError, UsageError
from reshard.system.ranks.heartbeat import build_connection_error
from reshard.system.ranks.team import Team
from reshard.system.ranks.torchrun import Ranks


def stage(destination, *, is_directory, overwrite=False, content=b"new"):
    with commit.stage_output(destination, is_directory=is_directory, overwrite=overwrite) as place:
        name = "x.json" if is_directory else destination.name
        (place / name).write_bytes(content)


@pytest.mark.parametrize("is_directory", [True, False])
def test_output_appears_under_its_name_and_nothing_else_does(tmp_path, is_directory):
    stage(tmp_path / "out", is_directory=is_directory)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("is_directory", [True, False])
def test_an_exception_leaves_nothing(tmp_path, is_directory, error):
    def fail():
        with commit.stage_output(
            tmp_path / "out", is_directory=is_directory, overwrite=False
        ) as place:
            (place / "out").write_bytes(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_file_that_was_to_be_replaced(tmp_path):
    (tmp_path / "out").write_bytes(b"old")

    def fail():
        with commit.stage_output(tmp_path / "out", is_directory=False, overwrite=True) as place:
            (place / "out").write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "out").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_destination_that_appears_meanwhile_is_never_replaced(tmp_path, is_directory):
    destination = tmp_path / "out"

    def race():
        with commit.stage_output(destination, is_directory=is_directory, overwrite=False) as place:
            (place / ("x.json" if is_directory else "out")).write_bytes(b"ours")
            if is_directory:
                destination.mkdir()
                (destination / "theirs.json").write_bytes(b"theirs")
            else:
                destination.write_bytes(b"theirs")

    with pytest.raises(ExistsError):
        race()
    held = destination / "theirs.json" if is_directory else destination
    assert held.read_bytes() == b"theirs"
    assert len(list(tmp_path.iterdir())) == 1


class Dying(Team):
    """A team of two, of which one is gone at a meeting."""

    size = 2

    def __init__(self, meeting, error):
        self.meetings, self.error = meeting, error

    def barrier(self):
        self.meetings -= 1
        if not self.meetings:
            raise self.error


def dead():
    return build_connection_error("rank 1", "ended without reporting an error")


@pytest.mark.parametrize("death", [dead, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("meeting", "said"),
    [(1, "nothing was"), (2, "nothing was"), (3, "was already written completely")],
)
def test_a_rank_that_dies_says_what_became_of_the_output(tmp_path, meeting, said, death):
    error = death()

    def write():
        options = {"is_directory": False, "overwrite": False, "team": Dying(meeting, error)}
        with commit.claim_output(tmp_path / "x", **options) as place:
            place.clear()
            (place.output / "x").write_bytes(b"all")

    with pytest.raises(type(error)):
        write()
    told = getattr(error, "remedy", "") or error.args[0]
    assert said in told
    assert ("run the same command again" in told) == (meeting < 3 and hasattr(error, "remedy"))
    assert [path.name for path in tmp_path.iterdir()] == (["x"] if meeting == 3 else [])


@pytest.mark.parametrize("death", [dead, KeyboardInterrupt])
def test_a_rank_that_dies_when_all_is_done_does_not_ask_for_another_run(death):
    error = death()
    ranks = object.__new__(Ranks)
    ranks.barrier = Dying(1, error).barrier
    with pytest.raises(type(error)):
        ranks.leave()
    assert (getattr(error, "remedy", "") or error.args[0]) == (
        "the work itself was already complete"
    )


def test_a_directory_gets_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        stage(tmp_path / "out", is_directory=True)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_a_source_is_no_destination(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ExistsError, match="inside the source"):
        check_destination(
            tmp_path / "run" / "x", [tmp_path / "run"], is_directory=False, overwrite=True
        )


def test_a_directory_that_holds_the_source_is_never_replaced(tmp_path):
    (tmp_path / "out" / "run").mkdir(parents=True)
    with pytest.raises(ExistsError, match="contains the source"):
        check_destination(
            tmp_path / "out", [tmp_path / "out" / "run"], is_directory=True, overwrite=True
        )


def test_overwriting_is_proposed_only_where_it_would_be_done(tmp_path):
    (tmp_path / "out/global_step3").mkdir(parents=True)
    for overwrite in (False, True):
        with pytest.raises(ExistsError) as raised:
            check_destination(tmp_path / "out", [], is_directory=True, overwrite=overwrite)
        assert "pass --overwrite" not in str(raised.value)
    assert "'global_step3', and it replaces only exported models" in str(raised.value)


def test_a_link_out_of_the_way_does_not_hide_the_source(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ExistsError, match="inside the source"):
        check_destination(
            tmp_path / "link" / "x", [tmp_path / "run"], is_directory=False, overwrite=True
        )


def test_a_mount_point_is_refused_before_anything_is_written():
    """An empty volume of a container: the output would grow outside of it, and find no name."""
    with pytest.raises(ExistsError, match="is a mount point"):
        check_destination(Path("/dev"), [], is_directory=True, overwrite=False)


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(UsageError, match="no directory"):
        check_destination(tmp_path / "no" / "x", [], is_directory=False, overwrite=False)


def test_a_directory_without_write_permission_is_an_error_before_any_work(tmp_path, monkeypatch):
    """Pages and manifests, too, are written when the work is done. Root has every permission."""
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)
    with pytest.raises(ReshardError, match=f"you may not write to {tmp_path}"):
        check_destination(tmp_path / "x.html", [], is_directory=False, overwrite=False)


def test_a_full_disk_of_temporary_files_is_not_that_of_the_output():
    with pytest.raises(ResourceError, match="TMPDIR"), temporary() as folder:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not Path(folder).exists()
