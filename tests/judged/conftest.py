"""Checkpoints that real frameworks wrote, made once a session (or kept by --checkpoints=DIR)."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.judged import sequences
from tests.judges import deepspeed_judge, library_judge, megatron_judge, torch_judge
from tests.judges.server import NOT_HERE

KEPT = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def checkpoints(request, tmp_path_factory):
    """Return a function: a judge's ``make_all``, cases, the folder to keep them -> directory.

    What an earlier run has kept is used, and what it lacked is tried again.
    """
    kept = request.config.getoption("--checkpoints")

    def find(make_all, names, folder) -> Path:
        place = Path(kept or shared(), folder)
        place.mkdir(parents=True, exist_ok=True)
        with (place / ".lock").open("w") as lock:  # of several test processes one makes them
            fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = {name for name in names if not (place / name).is_dir()}
            noted = place / NOT_HERE
            if noted.exists() and not kept:  # by another process of this run: nothing changes in it
                wanted -= json.loads(noted.read_text()).keys()
            if wanted:
                make_all(place, [name for name in names if name in wanted])
        return place

    def shared() -> Path:
        """Return the directory that all test processes of a run share."""
        own = tmp_path_factory.getbasetemp()
        return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "checkpoints"

    return find


@pytest.fixture(scope="session")
def made(request, checkpoints) -> Path:
    """Return a directory with a folder for each DeepSpeed case: ``run/`` and ``expected.pt``."""
    nvme = request.config.getoption("--nvme")
    names = [name for name, case in deepspeed_judge.CASES.items() if nvme or not case.nvme]
    return checkpoints(deepspeed_judge.make_all, names, "")


@pytest.fixture
def copied(made, tmp_path):
    """Return a function that makes a private, writable copy of one case's run directory."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(made / case / "run", tmp_path / "run"))

    return copy


@pytest.fixture(scope="session")
def libraries(checkpoints) -> Path:
    """Return a directory with a folder for each library case: ``ckpt/`` and ``expected.pt``."""
    names = [name for name, case in library_judge.CASES.items() if case.writable]
    return checkpoints(library_judge.make_all, names, "libraries")


@pytest.fixture(scope="session")
def library_case(libraries):
    """Return case -> its folder: made here, or the kept copy of a library that is not installed."""

    def find(case: str) -> Path:
        for place in (libraries, KEPT / library_judge.CASES[case].library):
            if (place / case).is_dir():
                return place / case
        reason = json.loads((libraries / library_judge.NOT_HERE).read_text())[case]
        return pytest.skip(f"not made: {reason}")

    return find


@pytest.fixture(scope="session")
def torch_made(checkpoints) -> Path:
    """Return a directory with a folder for each PyTorch case: ``ckpt/`` and ``expected.pt``."""
    names = [name for name, case in torch_judge.CASES.items() if torch_judge.writable(case)]
    return checkpoints(torch_judge.make_all, names, "torch")


@pytest.fixture(scope="session")
def sequences_made(checkpoints) -> Path:
    """Return a directory with a folder for each run of several checkpoints: ``run/``."""
    return checkpoints(sequences.make_all, list(sequences.RUNS), "sequences")


@pytest.fixture(scope="session")
def megatron_made(checkpoints) -> Path:
    """Return a directory with a folder for each Megatron case: its forms, and ``expected.pt``."""
    return checkpoints(megatron_judge.make_all, list(megatron_judge.CASES), "megatron")


@pytest.fixture(scope="session")
def megatron_case(megatron_made):
    """Return case -> its folder."""

    def find(case: str) -> Path:
        if (megatron_made / case).is_dir():
            return megatron_made / case
        reason = json.loads((megatron_made / megatron_judge.NOT_HERE).read_text())[case]
        return pytest.skip(f"not made: {reason}")

    return find
