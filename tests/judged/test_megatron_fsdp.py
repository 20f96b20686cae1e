"""The package ``megatron-fsdp`` resumes from the output, whose keys are its own."""

from __future__ import annotations

import pytest

import reshard
from tests.judges import megatron_fsdp_worker as worker
from tests.judges import programs
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]
SOURCES = {"fsdp": (3, 1), "hsdp": (4, 2)}  # -> ranks, replicas
RESUMED = (("fsdp", 2, 1), ("fsdp", 4, 2), ("hsdp", 3, 1))


def test_megatron_fsdp_resumes_at_other_sizes(tmp_path):
    jobs = [(size[0], worker.save, tmp_path / name, size[1]) for name, size in SOURCES.items()]
    saved = dict(zip(SOURCES, worlds.run_in_turn(worker.enter, jobs), strict=True))
    for name, (state, _) in saved.items():
        with reshard.open(tmp_path / name) as checkpoint:
            for (fqn, kind), values in state.items():
                held = checkpoint if kind == "param" else checkpoint.optimizer(kind)
                assert held[fqn][...].tolist() == values, (fqn, kind)
    jobs = []
    for name, ranks, replicas in RESUMED:
        out = tmp_path / f"{name}{ranks}"
        report = reshard.split(tmp_path / name, out, world_size=ranks)
        assert report.notes == []
        jobs.append((ranks, worker.resume, out, replicas))
    found = worlds.run_in_turn(worker.enter, jobs)
    for (name, *_), (state, losses) in zip(RESUMED, found, strict=True):
        assert state == saved[name][0]
        assert losses == pytest.approx(saved[name][1], abs=1e-6)
