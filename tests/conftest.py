"""Fixtures of every test: the menagerie, one thread a process, and no clock."""

from __future__ import annotations

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("busy", deadline=None)  # other work must not fail a test
hypothesis.settings.load_profile("busy")
os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that tests start


@pytest.fixture
def menagerie():
    """Name -> one tensor of every form."""
    from tests.menagerie import menagerie

    return menagerie()
