"""Options of the test run; pytest reads them here whatever it is asked to run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator

import pytest

from tests.support import combinations
from trainer.cores import avoid_preemption

# pytest would import them for doctests: megatron-core warns, and DeepSpeed may be missing.
collect_ignore_glob = ["tests/support/megatron/*.py", "tests/trainer/bare_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that keep the checkpoints of real frameworks and that run slow tests."""
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
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="run whole matrices of settings; otherwise any two values occur together in a case",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what the modules of tests, and the ranks that they start, take from this process."""
    avoid_preemption()
    if config.getoption("--every-combination"):
        os.environ[combinations.EVERY] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the two million objects of tests and frameworks.

    They stay until the end. Going through them was a third of the time to collect the tests, and a
    second again whenever the collector went through all objects later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save what a worker measured: xdist kills one that takes ten seconds to end."""
    coverage = sys.modules.get("coverage")
    measured = coverage and coverage.Coverage.current()
    if measured and hasattr(session.config, "workerinput"):
        measured.save()
