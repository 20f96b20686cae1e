"""torchtune's gathered optimizer beside weights of either of its checkpointers, and its DCP."""

from __future__ import annotations

import shutil

import pytest

import reshard
from reshard.errors import UsageError
from tests.judges import programs
from tests.judges import torchtune_worker as worker
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]


@pytest.mark.parametrize(
    ("family", "form", "own", "sizes"),
    [("llama3", "HF", 1, (1, 3)), ("qwen2", "HF", 1, (3,)), ("llama3", "TorchTune", 3, (1,))],
)
def test_torchtune_resumes_with_its_optimizer_at_other_sizes(family, form, own, sizes, tmp_path):
    told = (family, form, tmp_path)
    ((losses, expected),) = worlds.run_in_turn(worker.enter, [(2, worker.save, *told)])
    source = [tmp_path / "run" / "epoch_0", tmp_path / "run" / "recipe_state"]
    with reshard.open(source) as checkpoint:
        assert not any("not among the weights" in each for each in checkpoint.manifest.warnings)
        weights, *slots = expected
        if form == "HF":
            assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
            for slot, wanted in zip(("exp_avg", "exp_avg_sq"), slots, strict=True):
                found = checkpoint.optimizer(slot)
                assert {name: found[name][...].tolist() for name in found} == wanted
    with pytest.raises(UsageError, match="loads these files on any number of ranks"):
        reshard.split(source, tmp_path / "out", world_size=1)
    jobs = [(own, worker.resume_own, *told)]
    for ranks in sizes:
        out = tmp_path / f"out{ranks}"
        report = reshard.split(source, out, to="dcp", world_size=ranks)
        assert report.optimizer_tensors_in == report.optimizer_tensors_out
        jobs.append((ranks, worker.resume, family, form, out))
    assert worlds.run_in_turn(worker.enter, jobs) == [losses] * len(jobs)
    shutil.move(source[0], source[0].with_name("epoch_1"))
    again = reshard.inspect([source[0].with_name("epoch_1"), source[1]])
    assert any("is of the end of epoch_0" in each for each in again.manifest.warnings)


def test_torchtune_resumes_from_its_dcp_at_other_sizes(tmp_path):
    ((state, losses),) = worlds.run_in_turn(
        worker.enter, [(2, worker.save_distributed, tmp_path / "run")]
    )
    with reshard.open(tmp_path / "run") as checkpoint:
        parts = [checkpoint, checkpoint.optimizer("exp_avg"), checkpoint.optimizer("exp_avg_sq")]
        assert [{name: part[name][...].tolist() for name in part} for part in parts] == state
    jobs = []
    for ranks in (3, 1):
        out = tmp_path / f"out{ranks}"
        out.mkdir()
        reshard.split(tmp_path / "run", out / "dist_epoch_0", world_size=ranks)
        jobs.append((ranks, worker.resume_distributed, out))
    for found, after in worlds.run_in_turn(worker.enter, jobs):
        assert found == state
        assert after == pytest.approx(losses, rel=1e-6)
