"""The Trainer of transformers 4.40 resumes from a split of its checkpoint."""

from __future__ import annotations

import pytest

import reshard
from tests.judges import old_trainer_worker as worker
from tests.judges import programs, server

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM), programs.need(worker.DEEPSPEED)]
JUDGE = server.Judge(worker.__name__, "transformers 4.40", {})


def test_the_trainer_goes_on_at_other_sizes(tmp_path):
    losses = JUDGE.run(tmp_path, {"saved": (2, {})})["saved"]
    source = tmp_path / "saved" / "run" / "checkpoint-2"
    jobs = {}
    for size in (1, 3):
        out = tmp_path / f"split{size}" / source.name
        out.parent.mkdir()
        reshard.split(source, out, world_size=size)
        assert reshard.diff(source, out, kinds=["weight", "optimizer"]).same
        jobs[str(size)] = size, {"resume": str(out)}
    for found in JUDGE.run(tmp_path, jobs).values():
        assert found == pytest.approx(losses, abs=2e-4), found  # it rounds them to 1e-4
