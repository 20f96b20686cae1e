"""Options of the run; fixtures of every test: the menagerie, and one thread a process."""

from __future__ import annotations

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that tests start


def pytest_addoption(parser):
    parser.addoption(
        "--checkpoints",
        metavar="DIR",
        help="keep the checkpoints that real frameworks make in DIR, and use those already there",
    )
    parser.addoption(
        "--nvme",
        action="store_true",
        help="also make the runs that offload to disk (libaio-dev, minutes of compiling)",
    )


@pytest.fixture
def menagerie():
    """Name -> one tensor of every form."""
    from tests.menagerie import menagerie

    return menagerie()
