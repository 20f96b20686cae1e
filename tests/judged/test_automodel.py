"""NeMo Automodel's own Checkpointer resumes from the output, which has its two folders."""

from __future__ import annotations

import pytest

import reshard
from reshard.errors import UsageError
from tests.judges import automodel_worker as worker
from tests.judges import programs
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]


@pytest.mark.parametrize(("world", "sizes"), [(1, (1, 2)), (2, (1, 3))])
def test_automodel_resumes_at_other_sizes(world, sizes, tmp_path):
    source = tmp_path / "epoch_0_step_3"
    source.mkdir()
    ((*seen, weights, moments), *_) = worlds.run(world, worker.save, source, "Automodel", False)
    for ranks in sizes:
        out = tmp_path / f"out{ranks}"
        report = reshard.split(source, out, world_size=ranks)
        for path in (source, out):
            with reshard.open(path) as checkpoint:
                assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
                found = checkpoint.optimizer("exp_avg")
                assert {name: found[name][...].tolist() for name in found} == moments
        assert any("rng_global_rank_0.pt" in note for note in report.notes) == (ranks != world)
        assert worlds.run(ranks, worker.resume, out, "Automodel", False) == [seen] * ranks
        names = {path.relative_to(source) for path in source.rglob("*")}
        written = {path.relative_to(out) for path in out.rglob("*")}
        kept = {name for name in names if name.suffix in (".json", ".pt")}
        assert kept <= written
    with pytest.raises(UsageError, match="a layout that split does not"):
        reshard.split(source, tmp_path / "weights", init_optimizer="none")


@pytest.mark.parametrize(
    ("program", "world", "sizes"), [("Automodel", 1, (2,)), ("NeMo RL", 2, (1, 3))]
)
def test_automodel_resumes_an_adapter_at_other_sizes(program, world, sizes, tmp_path):
    run = tmp_path / "run"
    place = run / ("step_3/policy" if program == "NeMo RL" else "epoch_0_step_3")
    place.mkdir(parents=True)
    ((*seen, weights, moments), *_) = worlds.run(world, worker.save, place, program, True)
    for path in {run, place.parent, place}:
        with reshard.open(path) as checkpoint:
            assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
            found = checkpoint.optimizer("exp_avg")
            assert {name: found[name][...].tolist() for name in found} == moments
    for ranks in sizes:
        out = tmp_path / f"out{ranks}"
        reshard.split(run, out, world_size=ranks)
        assert reshard.diff(run, out).unequal == []
        names = {path.relative_to(place) for path in place.rglob("*.json")}
        assert names <= {path.relative_to(out) for path in out.rglob("*")}, names
        assert worlds.run(ranks, worker.resume, out, program, True) == [seen] * ranks
