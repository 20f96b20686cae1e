"""Options of the test run."""

from __future__ import annotations


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
