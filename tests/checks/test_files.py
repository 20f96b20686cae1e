"""Digests of files: a rank checks its own file, or the ranges of one that it loads."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import reshard
from reshard.checks import digests, files
from reshard.errors import CorruptError, UsageError

RUN = Path(__file__).parents[1] / "data" / "deepspeed_0.14.5" / "z3_mics_ws4" / "run"
RANK = "*zero_pp_rank_1_*optim_states.pt"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run of real DeepSpeed, and a manifest with blocks smaller than its files."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 10)
    shutil.copytree(RUN, tmp_path / "run")
    reshard.verify(tmp_path / "run", write_manifest=tmp_path / "manifest.json")
    return tmp_path / "run"


@pytest.fixture
def manifest(run):
    return run.parent / "manifest.json"


def find_file(run, pattern=RANK):
    (path,) = run.rglob(pattern)
    return path


def damage(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_digests_are_those_of_the_blocks(run, manifest):
    listed = json.loads(manifest.read_text())["files"]
    paths = {path.name: path for path in run.rglob("*states.pt")}
    assert {each["name"] for each in listed} == paths.keys()
    for each in listed:
        data = paths[each["name"]].read_bytes()
        blocks = [data[at : at + 1024] for at in range(0, len(data), 1024)]
        assert each["nbytes"] == len(data)
        assert each["sha256"] == [hashlib.sha256(block).hexdigest() for block in blocks]


@pytest.mark.parametrize("has_blake3", [True, False])
def test_a_rank_checks_its_own_file(run, manifest, has_blake3, monkeypatch):
    if not has_blake3:
        monkeypatch.setattr(files, "list_algorithms", lambda: (digests.SHA256,))
    other = find_file(run, "*zero_pp_rank_0_*optim_states.pt")
    damage(other, 5000)
    report = reshard.verify(run, against=manifest, include=[RANK])
    assert report.passed
    assert report.bytes_read == find_file(run).stat().st_size
    reshard.check_file(find_file(run), manifest)
    damage(find_file(run), 3000)
    report = reshard.verify(run, against=manifest, include=[RANK])
    assert (report.exit_code, report.check("files").failures) == (
        3,
        [f"{find_file(run)}: its contents differ from those in the manifest in bytes 2048-3072"],
    )
    with pytest.raises(CorruptError, match="in bytes 2048-3072"):
        reshard.check_file(find_file(run), manifest)


def test_only_the_blocks_of_the_ranges_are_read(run, manifest, monkeypatch):
    path, read = find_file(run), []
    own = files.SourceFiles.read_into
    monkeypatch.setattr(
        files.SourceFiles,
        "read_into",
        lambda *args: (read.append(args[2:]), own(*args))[1],
    )
    damage(path, 3000)
    reshard.check_file(path, manifest, ranges=[(0, 10), (1020, 1030), (4096, 4096)])
    assert [(start, len(block)) for start, block in read] == [(0, 1024), (1024, 1024)]
    with pytest.raises(CorruptError):
        reshard.check_file(path, manifest, ranges=[(3071, 3073)])
    reshard.check_file(path, manifest, ranges=[(3072, 4000)])
    with pytest.raises(UsageError, match="is not inside"):
        reshard.check_file(path, manifest, ranges=[(0, path.stat().st_size + 1)])


def test_a_node_needs_only_the_files_of_its_ranks(run, manifest):
    for path in run.rglob("*states.pt"):
        if "rank_1_" not in path.name:
            path.unlink()
    assert reshard.verify(run, against=manifest, include=["*rank_1_*"]).passed
    report = reshard.verify(run, against=manifest, include=["*rank_[01]_*"])
    assert sorted(report.check("files").failures) == [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing",
        "zero_pp_rank_0_mp_rank_00_model_states.pt is missing",
    ]


def test_a_run_of_several_checkpoints_is_checked_at_the_chosen_one(run, manifest):
    (checkpoint,) = (path for path in run.iterdir() if path.is_dir())
    other = checkpoint.with_name("global_step99")
    shutil.copytree(checkpoint, other)
    damage(find_file(other), 3000)
    assert reshard.verify(run, against=manifest, include=[RANK]).passed
    report = reshard.verify(run, against=manifest, include=[RANK], tag="99")
    assert str(other) in report.check("files").failures[0]
    (run / "latest").unlink()
    assert not reshard.verify(run, against=manifest, include=[RANK]).passed


def test_a_file_of_another_size_differs(run, manifest):
    path = find_file(run)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"bytes, but the manifest states \d+"):
        reshard.check_file(path, manifest, ranges=[(0, 1)])


def test_what_is_refused(run, manifest, tmp_path):
    with pytest.raises(UsageError, match="pass --against"):
        reshard.verify(run, include=["*"])
    with pytest.raises(UsageError, match="matches no file"):
        reshard.verify(run, against=manifest, include=["rank_77*"])
    with pytest.raises(UsageError, match="no effect with --include"):
        reshard.verify(run, against=manifest, include=["*"], ignore=["x"])
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="is not a file that the manifest"):
        reshard.check_file(tmp_path / "other.pt", manifest)
    document = json.loads(manifest.read_text())
    document["files"][0]["sha256"][0] = "0" * 64
    manifest.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match="was altered"):
        reshard.check_file(find_file(run), manifest)
