"""A job script may run `split`, or any command with --resume, again: the same output is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch

import reshard
from reshard import formats
from reshard.errors import ExistsError, UsageError
from reshard.formats.pytorch import ranks


@pytest.fixture
def saved(tmp_path):
    """Save a training state of torch in one file; return it, and a function that saves another."""
    path = tmp_path / "state.pt"

    def save(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(33, 17)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.ones(2, 33)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        return path

    return save


def run(*arguments):
    command = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("to", "name"), [("dcp", "out"), ("torch", "out.pt"), ("fsdp2", "out")])
def test_the_same_command_leaves_the_output(saved, tmp_path, to, name):
    source, out = saved(1), tmp_path / name
    first = reshard.split(source, out, to=to, world_size=2)
    files = [path for path in [out, *out.rglob("*")] if path.is_file()]
    before = [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    again = reshard.split(source, out, to=to, world_size=2)
    assert not first.already_there
    assert again.done
    assert again.already_there
    assert next(iter(again.lines())).startswith("already there")
    assert before == [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]


def test_any_command_with_resume_leaves_the_same_output(saved, tmp_path):
    source, other = saved(1), tmp_path / "other.pt"
    shutil.copy(saved(2), other)
    saved(1)
    commands = {
        "merge": partial(reshard.merge, source, tmp_path / "merged"),
        "file": partial(reshard.merge, source, tmp_path / "one.safetensors", dtype="bf16"),
        "convert": partial(reshard.split, source, tmp_path / "dcp", to="dcp"),
        "average": partial(reshard.average, [source, other], tmp_path / "mean"),
    }
    for name, command in commands.items():
        reports = [command(resume=True) for _ in range(2)]
        assert [report.already_there for report in reports] == [False, True], name
        assert next(iter(reports[1].lines())).startswith("already there"), name
        command(resume=True, dry_run=True)
    for options in ({"resume": True, "dtype": "fp16"}, {}):
        with pytest.raises(ExistsError):
            commands["merge"](**options)


@pytest.mark.parametrize("change", ["source", "world size", "cut", "lost", "changed"])
def test_any_other_output_is_an_error_as_before(saved, tmp_path, change):
    source, out, ranks = saved(1), tmp_path / "out", 2
    reshard.split(source, out, to="dcp", world_size=ranks)
    file = out / "__1_0.distcp"
    if change == "source":
        saved(2)
    elif change == "world size":
        ranks = 3
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif change == "lost":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(ExistsError, match="is not empty"):
        reshard.split(source, out, to="dcp", world_size=ranks)


def test_the_launcher_gives_the_number_of_ranks(saved, tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    command = ["convert", saved(1), tmp_path / "out", "--to", "dcp", "--world-size", "auto"]
    result = run(*command)
    assert result.returncode == UsageError.exit_code
    assert "needs a launcher" in result.stderr
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert run(*command).returncode == 0
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 3
    again = run(*command)
    assert again.returncode == 0
    assert "already there" in again.stdout


def test_rank_files_that_are_alike_are_read_once_if_they_are(tmp_path):
    """Rank 7's pickle is changed after that: then its tensors are read, too."""
    torch.save({"a": torch.ones(36, 3), "b": torch.ones(36)}, tmp_path / "whole.pt")
    out = tmp_path / "out"
    reshard.split(tmp_path / "whole.pt", out, to="fsdp2", world_size=12)
    path = {rank: str(out / f"model_rank{rank}.pt") for rank in range(12)}
    alike = {path[rank]: path[0] for rank in range(1, 10)} | {path[11]: path[10]}

    def list_read():
        manifest = formats.read(out, alike=alike, prove=False)
        assert manifest.files.keys() == {*path.values()}
        return {chunk.file for entry in manifest.entries.values() for chunk in entry.chunks}

    assert list_read() == {path[0], path[10]}
    with zipfile.ZipFile(path[7]) as file:
        (pickle,) = (info for info in file.infolist() if info.filename.endswith("data.pkl"))
        before = file.read(pickle)
    after = before.replace(b"_thread_id", b"_thread_ID")
    sums = [zlib.crc32(each).to_bytes(4, "little") for each in (before, after)]
    data = Path(path[7]).read_bytes()
    Path(path[7]).write_bytes(data.replace(before, after).replace(*sums))
    assert list_read() == {path[0], path[7], path[10]}


def test_rank_files_that_are_not_found_to_be_alike_are_checked_whole(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(36, 3), "b": torch.ones(36)}, tmp_path / "whole.pt")
    monkeypatch.setattr(ranks, "_are_alike", lambda file, _other: "rank7" not in file.path)
    reshard.split(tmp_path / "whole.pt", tmp_path / "out", to="fsdp2", world_size=12)
    assert len(list((tmp_path / "out").iterdir())) == 12
