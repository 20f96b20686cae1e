"""slime and miles resume from the output with their scheduler and counters."""

from __future__ import annotations

import pytest

import reshard
from tests.judges import programs
from tests.judges import slime_worker as worker
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]


@pytest.mark.parametrize(("world", "sizes"), [(1, (2,)), (2, (1, 3))])
def test_slime_resumes_at_other_sizes(world, sizes, tmp_path):
    source = tmp_path / "run"
    ((*seen, weights, moments), *_) = worlds.run(world, worker.save, source)
    with reshard.open(source) as checkpoint:
        assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
        found = checkpoint.optimizer("exp_avg")
        assert {name: found[name][...].tolist() for name in found} == moments
    for ranks in sizes:
        is_step = ranks > 1  # else the output is a run
        run = tmp_path / f"out{ranks}"
        path = run / "iter_0000003" if is_step else run
        path.parent.mkdir(exist_ok=True)
        report = reshard.split(source, path, world_size=ranks)
        assert not any("not read" in line or "not copied" in line for line in report.lines())
        found = worlds.run(ranks, worker.resume, run, is_step)[0]
        assert found[0] == pytest.approx(seen[0], rel=1e-6)  # gradients sum in another order
        assert found[1:] == seen[1:]
        names = {each.relative_to(run) for each in run.rglob("*") if each.suffix != ".distcp"}
        own = {each.relative_to(source) for each in source.rglob("*")}
        assert names - own == set()
