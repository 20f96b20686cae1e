"""One process becomes N, and however one of them ends, the others end soon and one says why."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.programs import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

# In place of the trainer's session: in the fourth step, rank WHO does WHAT.
SESSION = """
import os, signal, time
import torch, torch.distributed as dist
from trainer.core.errors import CheckpointError, TrainingError

def run(settings, ranks):
    what, who = os.environ["SCENE"].split(":")
    for step in range(settings.steps):
        if step == 3 and who in (str(ranks.rank), "all"):
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "ended":
                os._exit(7)
            if what == "stuck":
                time.sleep(600)
            if what == "bug":
                raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
            if what == "alone":
                raise TrainingError("the disk is full", "free some", one_rank=True)
            if what == "forbidden":
                raise PermissionError(13, "Permission denied", "/run/latest")
            if what == "together":
                raise CheckpointError("no such checkpoint", "look")
        ones = torch.ones(2)
        dist.all_reduce(ones)
        if step == 2 and ranks.is_first:
            print("running", flush=True)
        time.sleep(0.05)
    if ranks.is_first:
        print("sum", ones[0].item(), "threads", os.environ.get("OMP_NUM_THREADS"), flush=True)
"""
SITE = """
import importlib.util, os, pathlib, sys

with pathlib.Path(__file__).with_name("started").open("a") as file:
    file.write(f"{os.getpid()}\\n")

class Stand:
    def find_spec(name, path=None, target=None):
        if name == "transformers":  # the ranks have no model, so the launcher need not import it
            raise ModuleNotFoundError(name)
        if name == "trainer.session":
            place = pathlib.Path(__file__).with_name("session.py")
            return importlib.util.spec_from_file_location(name, place)

sys.meta_path.insert(0, Stand)
"""
OURS = [sys.executable, "-m", "trainer", "--nproc", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
ACCELERATE += [str(ROOT / "examples/configs/accelerate_fsdp.yaml"), "-m", "trainer"]


@pytest.fixture(scope="module")
def imported():
    """Return `OURS` as a fork of a process that has imported the trainer and torch's launcher.

    The ranks are started as always. A real process needs another second for its imports.
    """
    with forked.serving(["trainer.cli", "torch.distributed.launcher.api"]) as path:
        yield [*forked.build_command(path, 0), *OURS[1:]]


@pytest.fixture
def begin(tmp_path):
    """Start a command with the stand-in session; nothing of it is left afterwards."""
    (tmp_path / "session.py").write_text(SESSION)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    started = []

    def begin(scene, *flags, command=OURS):
        process = subprocess.Popen(
            [*command, "--device", "cpu", "--steps", "8", *flags],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "SCENE": scene},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(begin):
    """Run a scene to its end: exit code, stdout, stderr."""

    def run(scene, *flags, command=OURS):
        process = begin(scene, *flags, command=command)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    return run


def test_ranks_run_together_and_nothing_else_is_said(run):
    code, out, err = run("none:0", "--threads", "1")
    assert (code, err) == (0, "")
    assert out == "running\nsum 2.0 threads 1\n"


def test_one_rank_runs_in_this_process(run):
    code, out, err = run("none:0", command=[sys.executable, "-m", "trainer"])
    assert (code, err) == (0, "")
    assert "sum 1.0" in out


FORBIDDEN = (
    "error: /run/latest cannot be accessed: Permission denied\n"
    "  -> give paths that this user may read, and a --save that this user may write to\n"
)


@pytest.mark.parametrize(
    ("scene", "code", "message"),
    [
        ("killed:1", 1, "error: rank 1 died (SIGKILL); the other ranks were stopped\n"),
        ("ended:1", 7, "error: rank 1 ended with exit code 7; the other ranks were stopped\n"),
        ("alone:1", 1, "rank 1: the disk is full\n  -> free some\n"),
        ("together:all", 3, "error: no such checkpoint\n  -> look\n"),
        ("together:1", 3, "rank 1: no such checkpoint\n  -> look\n"),
        ("forbidden:all", 2, FORBIDDEN),
    ],
)
def test_a_failure_ends_all_ranks_with_one_message(run, imported, scene, code, message):
    assert run(scene, command=imported) == (code, "running\n", message)


def test_a_bug_keeps_its_traceback_once(run, imported):
    code, _, err = run("bug:all", command=imported)
    assert code == 1
    assert err.startswith("error: a bug in the trainer\nTraceback")
    assert err.endswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied\n")
    assert err.count("Traceback") == 1


def test_a_rank_that_answers_no_more_is_given_up_after_the_timeout(run, imported):
    for seconds in (3, 15, 75):  # until the ranks have met within that time
        code, out, err = run("stuck:1", "--timeout", str(seconds), command=imported)
        if out:
            break
    assert (code, out) == (1, "running\n")
    assert err.startswith("rank 0: lost the other ranks (")
    assert f"Timed out waiting {seconds}000ms" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_a_signal_stops_all_ranks(begin, imported, number, code, word):
    process = begin("none:0", "--steps", "1000", command=imported)
    assert process.stdout.readline() == "running\n"
    process.send_signal(getattr(signal, number))
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (code, f"error: {word}; all ranks were stopped\n")


def test_ranks_end_with_the_process_that_started_them(begin):
    process = begin("none:0", "--steps", "1000")
    assert process.stdout.readline() == "running\n"
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    children = _list_children(process.pid)  # one of which forks the ranks
    ranks = [rank for child in children for rank in _list_children(child)]
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + LIMIT_S
    while any(map(_runs, [*children, *ranks])) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(_runs, [*children, *ranks]))


def _list_children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid):
    """Return whether a process has not ended; a zombie has."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_bad_settings_start_no_ranks(run, tmp_path):
    code, out, err = run("none:0", "--lr", "-1")
    assert (code, out) == (2, "")
    assert err.startswith("error: lr is -1.0")
    assert len((tmp_path / "started").read_text().split()) == 1


@pytest.mark.judge
@pytest.mark.parametrize(
    ("command", "scene", "code", "message"),
    [(TORCHRUN, "none:0", 0, ""), (ACCELERATE, "killed:1", 1, "SIGKILL")],
    ids=["torchrun", "accelerate"],
)
def test_real_launchers_start_and_end_the_ranks(run, command, scene, code, message):
    if "accelerate" in command[2] and not importlib.util.find_spec("accelerate"):
        pytest.skip("needs accelerate")
    done, out, err = run(scene, command=command)
    assert done == code
    assert "running" in out  # both ranks met
    assert ("sum 2.0" in out) == (code == 0)
    assert message in err
