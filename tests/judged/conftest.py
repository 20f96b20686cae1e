"""Checkpoints that real frameworks wrote, made once a session (or kept by --checkpoints=DIR)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.judges import deepspeed_judge
from tests.judges.deepspeed_cases import CASES


@pytest.fixture(scope="session")
def made(request, tmp_path_factory) -> Path:
    """A directory with a folder a case: ``run/`` and ``reference.pt``."""
    kept = request.config.getoption("--checkpoints")
    place = Path(kept) if kept else tmp_path_factory.mktemp("checkpoints")
    nvme = request.config.getoption("--nvme")
    wanted = [
        name
        for name, case in CASES.items()
        if not (place / name).is_dir() and (nvme or not case.nvme)
    ]
    if wanted:
        deepspeed_judge.make_all(place, wanted)
    return place


@pytest.fixture
def copied(made, tmp_path):
    """A private, writable copy of one case's run directory."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(made / case / "run", tmp_path / "run"))

    return copy
