"""Fixtures of every test: the menagerie, and one thread a process."""

from __future__ import annotations

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that tests start


@pytest.fixture
def menagerie():
    """Name -> one tensor of every form."""
    from tests.menagerie import menagerie

    return menagerie()
