"""OLMo-core's own Checkpointer resumes from the output, with the state of its trainer."""

from __future__ import annotations

import pytest

import reshard
from tests.judges import olmo_core_worker as worker
from tests.judges import programs
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]


SIZES = {1: (2,), 2: (1, 2, 3)}  # ranks of the source -> of the outputs


def test_olmo_core_resumes_with_its_trainer_at_other_sizes(tmp_path):
    sources = {world: tmp_path / f"run{world}" / "step3" for world in SIZES}
    jobs = [(world, worker.save, source) for world, source in sources.items()]
    made = worlds.run_in_turn(worker.enter, jobs)
    jobs, expected = [], []
    for (world, source), (losses, state) in zip(sources.items(), made, strict=True):
        for ranks in SIZES[world]:
            out = tmp_path / f"out{world}{ranks}" / "step3"
            out.parent.mkdir()
            report = reshard.split(source.parent, out, world_size=ranks)
            copied = [".metadata.json", *(f"train/rank{rank}.pt" for rank in range(world))]
            assert f"{', '.join(copied)}: copied byte for byte" in report.kept
            assert all((out / name).read_bytes() == (source / name).read_bytes() for name in copied)
            assert not any("not read" in line for line in report.lines())
            assert any("train/rank0.pt" in note for note in report.notes) == (ranks != world)
            assert reshard.diff(source, out).same
            jobs.append((ranks, worker.resume, out))
            saved_by = [rank if rank < world else 0 for rank in range(ranks)]
            expected.append((losses, state, saved_by))
    assert worlds.run_in_turn(worker.enter, jobs) == expected
