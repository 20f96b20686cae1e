"""Settings and fixtures of every test: one thread per process, no time limit in hypothesis."""

from __future__ import annotations

import contextlib
import gc
import os

import hypothesis
import pytest

hypothesis.settings.register_profile("busy", deadline=None)  # a busy machine must not fail a test
hypothesis.settings.load_profile("busy")
os.environ["OMP_NUM_THREADS"] = "1"  # processes that tests start inherit it
with contextlib.suppress(AttributeError, OSError):  # not on Linux; forbidden
    # A thread of gloo spins while another holds its lock. Where what wakes up preempts nothing, the
    # owner gives it back first: with more ranks than cores, collectives take half of the CPU time.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.environ["LOCAL_SIZE"] = "1"  # or DeepSpeed on CPUs runs numactl for each bucket of gradients


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in a folder ``judged`` as `judge`, and let the longest files begin.

    Workers take whole files (``--dist loadfile``): a long one at the end would leave a worker idle.
    """
    for item in items:
        if "judged" in item.path.parts:
            item.add_marker("judge")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    judged = {item.path for item in items if item.get_closest_marker("judge")}
    items.sort(key=lambda item: (item.path not in slow, item.path not in judged))


def pytest_collection_finish() -> None:
    """Keep what was collected out of the garbage collector's way; all of it stays to the end."""
    gc.freeze()


@pytest.fixture
def sample_tensors():
    """Return one tensor of every form, by name."""
    from tests.support.sample_tensors import sample_tensors

    return sample_tensors()
