"""Fixtures: copies of nanotron's runs, and the Megatron runs of the repository's judges."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plugins.nanotron.tests.judged.samples import KEPT
from tests.judged.conftest import checkpoints, megatron_case, megatron_made

__all__ = ["checkpoints", "copied", "megatron_case", "megatron_made"]


@pytest.fixture
def copied(tmp_path):
    """Return a function that makes a private, writable copy of a run."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(KEPT / case / "ckpt", tmp_path / "run"))

    return copy
