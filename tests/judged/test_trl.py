"""TRL's trainers resume from splits of their checkpoints."""

from __future__ import annotations

import pytest

import reshard
from tests.judges import programs
from tests.judges import trl_worker as worker
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]
TRAINERS = [worker.train_sft, worker.train_reward, worker.train_grpo]


def test_the_trainers_go_on_at_other_sizes(tmp_path):
    places = [tmp_path / train.__name__ for train in TRAINERS]
    jobs = [(2, train, place) for train, place in zip(TRAINERS, places, strict=True)]
    losses = worlds.run_in_turn(worker.enter, jobs)
    jobs = []
    for train, place in zip(TRAINERS, places, strict=True):
        source = place / "checkpoint-2"
        for ranks in (1, 3):
            out = tmp_path / f"{place.name}{ranks}" / source.name
            out.parent.mkdir()
            reshard.split(source, out, world_size=ranks)
            assert reshard.diff(source, out, kinds=["weight", "optimizer"]).same
            jobs.append((ranks, train, out.parent, out))
    found = worlds.run_in_turn(worker.enter, jobs)
    assert found == [pytest.approx(of_one, rel=1e-5) for of_one in losses for _ in (1, 3)]
