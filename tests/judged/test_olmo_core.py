"""OLMo-core's own Checkpointer resumes from the output, with the state of its trainer."""

from __future__ import annotations

import pytest

import reshard
from tests.judges import olmo_core_worker as worker
from tests.trainer import worlds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not worker.LIBRARY, reason="RESHARD_OLMO_CORE is not set"),
]


@pytest.mark.parametrize("world", [1, 2])
def test_olmo_core_resumes_with_its_trainer_at_other_sizes(world, tmp_path):
    source = tmp_path / "run" / "step3"
    ((losses, state), *_) = worlds.run(world, worker.save, source)
    for ranks in (1, 2, 3):
        out = tmp_path / f"out{ranks}" / "step3"
        out.parent.mkdir()
        report = reshard.split(source.parent, out, world_size=ranks)
        copied = [".metadata.json", *(f"train/rank{rank}.pt" for rank in range(world))]
        assert f"{', '.join(copied)}: copied byte for byte" in report.kept
        assert all((out / name).read_bytes() == (source / name).read_bytes() for name in copied)
        assert not any("not read" in line for line in report.lines())
        assert any("train/rank0.pt" in note for note in report.notes) == (ranks != world)
        assert reshard.diff(source, out).same
        saved_by = [rank if rank < world else 0 for rank in range(ranks)]
        assert worlds.run(ranks, worker.resume, out) == [(losses, state, by) for by in saved_by]
