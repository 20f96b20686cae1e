"""One conversion by several processes: the bytes are those of one; if one dies, all of them end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import pytest

from tests.support import forked, object_stores
from tests.support.directories import read_files
from tests.support.object_stores import EXAMPLE, bucket  # noqa: F401
from tests.support.object_stores import started as served  # noqa: F401
from tests.support.ports import find_free_port
from tests.support.programs import LIMIT_S

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run")
IMPORTED = ["reshard.cli", "reshard.commands.merge.command", "reshard.commands.split.command"]
IMPORTED += [
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
]
MISHAPS = """
import os, signal, sys, time
from reshard.engine.move import execute
from reshard.engine.move import journal
from reshard.system.ranks import heartbeat, torchrun
from reshard.cli import main
from reshard.errors import CorruptError
from reshard.engine.move import receipts

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def fail(*_, **__):
    raise CorruptError("file.pt", "is not what it was")

def die_late(kept, seen):
    append(kept, seen)
    if len(kept._path.read_bytes().splitlines()) > 3:
        die()

def stall(*_, **__):
    time.sleep(4)  # as a slow disk may; longer than `torchrun._REPORT_WAIT`

def die_sent(kept, file, seen):
    keep(kept, file, seen)
    die()

receipts.MIN_BYTES = 1
keep = receipts.Receipts.keep
append = journal.Journal._append
# All waits are shorter than those of users, and so are the pauses between heartbeats.
heartbeat._BEAT, torchrun._PATIENCE, torchrun._REPORT_WAIT = 0.25, 4.0, 2.0
mishap = sys.argv.pop(1)
if mishap in ("die late", "die and stall"):
    journal.BATCH_BYTES = 1
if mishap == "die and stall" and os.environ["RANK"] == "2":
    execute.OutputBuilder.fill = stall
elif mishap in ("die late", "die and stall") and os.environ["RANK"] == "1":
    journal.Journal._append = die_late
elif os.environ["RANK"] == "1" and mishap == "die sent":
    receipts.Receipts.keep = die_sent
elif os.environ["RANK"] == ("0" if mishap == "first dies" else "1"):
    execute.OutputBuilder.fill = {"die": die, "first dies": die, "fail": fail}[mishap]
main()
"""


class Launcher:
    """Starts programs as forks of one process, which has imported reshard and torch.

    Args:
        python: the command that stands for ``python``.
    """

    def __init__(self, python):
        self.python = python

    def start(self, *program, launched_by=(), **environment):
        """Start a program; ``launched_by`` is a launcher to start instead, which starts it."""
        environment = {key: str(value) for key, value in environment.items()}
        return subprocess.Popen(
            [*self.python, *map(str, launched_by), *(self.python * bool(launched_by))]
            + [str(word) for word in program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    def nodes(self, count, each, *program):
        """Start ``torchrun`` once per node; all of them on this machine."""
        port = find_free_port()
        shape = (f"--nnodes={count}", f"--nproc-per-node={each}", "--no-python")
        where = ("--master-addr=127.0.0.1", f"--master-port={port}")
        return [
            self.start(*program, launched_by=(*TORCHRUN, *shape, *where, f"--node-rank={node}"))
            for node in range(count)
        ]

    def ranks(self, count, *program):
        """Start processes as any launcher may: no process watches over them."""
        port = find_free_port()
        return [
            self.start(
                *program, RANK=rank, WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            )
            for rank in range(count)
        ]

    def alone(self, *program):
        """Run one process to its end, which must be a good one."""
        codes, _, err = ended([self.start(*program)])
        assert codes == [0], err


@pytest.fixture(scope="module")
def launcher():
    with forked.serving(IMPORTED) as path:
        yield Launcher(forked.build_command(path, 0))


def ended(programs):
    """Return (exit codes, stdout, stderr) of all."""
    try:
        outputs = [program.communicate(timeout=LIMIT_S) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return (
        [program.returncode for program in programs],
        "".join(out for out, _ in outputs),
        "".join(err for _, err in outputs),
    )


@pytest.mark.parametrize(
    ("start", "words"),
    [
        # torch archives: the checksums of what several ranks wrote are joined
        (lambda launcher, *program: launcher.ranks(3, *program), ("convert", "--to", "dcp")),
        (
            lambda launcher, *program: launcher.nodes(2, 1, *program),
            ("merge", "--max-shard-size", "20KB"),
        ),
    ],
    ids=["three ranks", "two nodes"],
)
def test_several_processes_write_the_bytes_of_one(launcher, tmp_path, start, words):
    command, options = words[0], words[1:]
    launcher.alone("-m", "reshard", command, EXAMPLE, tmp_path / "one", *options)
    options += ("--workers", "1")
    many = start(launcher, "-m", "reshard", command, EXAMPLE, tmp_path / "many", *options)
    codes, out, err = ended(many)
    assert set(codes) == {0}, err
    assert read_files(tmp_path / "many") == read_files(tmp_path / "one")
    assert out.count("every byte read back") == 1  # one report
    assert {path.name for path in tmp_path.iterdir()} == {"one", "many"}


@pytest.fixture
def mishaps(tmp_path):
    path = tmp_path / "mishaps.py"
    path.write_text(MISHAPS)
    return path


def test_another_run_continues_after_a_killed_worker(launcher, tmp_path, mishaps):
    words = ("--to", "dcp", "--max-memory", "128KiB", "--workers", "1")
    codes, _, err = ended(
        launcher.nodes(1, 3, mishaps, "die late", "convert", EXAMPLE, tmp_path / "out", *words)
    )
    assert codes == [1]
    assert f"rank 1 ({socket.gethostname()}): ended without reporting an error" in err, err
    assert "pass --resume to continue" in err, err
    left = tmp_path / ".out.partial"
    assert not (tmp_path / "out").exists()
    assert (left / "journal-1").exists()
    for name in ("by-two", "by-three"):
        shutil.copytree(left, tmp_path / f".{name}.partial")
    again = ("-m", "reshard", "convert", EXAMPLE)
    runs = {
        "by-two": launcher.ranks(2, *again, tmp_path / "by-two", *words, "--resume"),
        "by-three": launcher.nodes(1, 3, *again, tmp_path / "by-three", *words, "--resume"),
        "out": [launcher.start(*again, tmp_path / "out", *words, "--resume")],
        "unbroken": [launcher.start(*again, tmp_path / "unbroken", *words)],
    }
    for name, programs in runs.items():
        codes, out, err = ended(programs)
        assert set(codes) == {0}, err
        assert ("of an interrupted run" in out) == (name != "unbroken"), out
    wanted = read_files(tmp_path / "unbroken")
    assert all(read_files(tmp_path / name) == wanted for name in runs)
    assert {path.name for path in tmp_path.iterdir()} == {*runs, mishaps.name}


def test_a_rank_that_waits_for_its_disk_is_not_called_dead(launcher, tmp_path, mishaps):
    words = ("--to", "dcp", "--max-memory", "128KiB", "--workers", "1")
    _, _, err = ended(
        launcher.nodes(1, 3, mishaps, "die and stall", "convert", EXAMPLE, tmp_path / "out", *words)
    )
    assert f"rank 1 ({socket.gethostname()}): ended without reporting an error" in err, err
    assert "pass --resume to continue" in err, err


def test_a_killed_worker_ends_the_run_and_leaves_nothing(launcher, tmp_path, mishaps):
    words = ("die", "convert", EXAMPLE, tmp_path / "out", "--to", "dcp")
    codes, out, err = ended(launcher.nodes(1, 3, mishaps, *words))
    assert codes == [1]  # torchrun's own
    assert f"rank 1 ({socket.gethostname()}): ended without reporting an error" in err, err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["mishaps.py"]


def test_the_death_of_the_first_rank_is_reported_by_another(launcher, tmp_path, mishaps):
    words = ("first dies", "merge", EXAMPLE, tmp_path / "out")
    codes, _, err = ended(launcher.nodes(1, 2, mishaps, *words))
    assert codes == [1]  # torchrun's own
    assert f"rank 0 ({socket.gethostname()}): ended without reporting an error" in err, err
    assert not (tmp_path / "out").exists()
    _, _, err = ended([launcher.start("-m", "reshard", *words[1:])])
    assert {path.name for path in tmp_path.iterdir()} == {"out", "mishaps.py"}, err


def test_a_lost_machine_ends_the_run(launcher, tmp_path, mishaps):
    words = ("die", "convert", EXAMPLE, tmp_path / "out", "--to", "dcp")
    codes, _, err = ended(launcher.ranks(2, mishaps, *words))
    assert codes == [2, -9]
    assert f"rank 1 ({socket.gethostname()}): sent no heartbeat for 4 s" in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["mishaps.py"]


def test_an_error_of_one_rank_is_printed_once_and_ends_all(launcher, tmp_path, mishaps):
    words = ("fail", "convert", EXAMPLE, tmp_path / "out", "--to", "dcp")
    codes, _, err = ended(launcher.ranks(3, mishaps, *words))
    assert codes == [3, 3, 3]  # as one process that meets a corrupt file
    assert err.count("file.pt: is not what it was") == 1, err
    assert err.startswith(f"reshard: rank 1 ({socket.gethostname()})")
    assert [path.name for path in tmp_path.iterdir()] == ["mishaps.py"]


def test_ranks_with_different_arguments_are_refused(launcher, tmp_path):
    start = ("-m", "reshard", "convert", EXAMPLE, tmp_path / "out", "--to")
    port = find_free_port()
    both = [
        launcher.start(
            *start,
            target,
            RANK=rank,
            WORLD_SIZE=2,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank, target in enumerate(("dcp", "ds-universal"))
    ]
    codes, _, err = ended(both)
    assert set(codes) == {1}
    assert "is not the same on all 2 ranks: rank 1 and rank 0 differ" in err, err
    assert list(tmp_path.iterdir()) == []


def test_several_processes_write_to_a_store_and_others_continue(launcher, tmp_path, mishaps, files):
    out = "s3://bucket/many/out"
    words = ("--to", "dcp", "--workers", "1", "--resume")
    codes, _, err = ended(
        launcher.nodes(1, 3, mishaps, "die sent", "convert", EXAMPLE, out, *words)
    )
    assert codes == [1]
    assert f"rank 1 ({socket.gethostname()}): ended without reporting an error" in err, err
    assert "are kept in s3://bucket/many/.out.partial; pass --resume to continue" in err, err
    assert object_stores.contents(files, "bucket/many/out") == {}
    codes, said, err = ended(launcher.ranks(2, "-m", "reshard", "convert", EXAMPLE, out, *words))
    assert codes == [0, 0], err
    assert "of an interrupted run" in said
    assert said.count("every byte read back") == 1
    launcher.alone("-m", "reshard", "convert", EXAMPLE, tmp_path / "one", "--to", "dcp")
    assert object_stores.contents(files, "bucket/many/out") == read_files(tmp_path / "one")
    assert files.find("bucket/many") == files.find("bucket/many/out")


def test_a_killed_worker_leaves_nothing_in_a_store(launcher, mishaps, files):
    words = ("die sent", "convert", EXAMPLE, "s3://bucket/killed/out", "--to", "dcp")
    codes, _, err = ended(launcher.ranks(2, mishaps, *words))
    assert codes == [2, -9], err
    assert f"rank 1 ({socket.gethostname()}): sent no heartbeat for 4 s" in err, err
    assert "nothing was written to s3://bucket/killed/out" in err, err
    files.invalidate_cache()
    assert files.find("bucket/killed") == []
