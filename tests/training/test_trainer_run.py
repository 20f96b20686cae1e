"""The device mesh of a run of ``python -m trainer`` at another number of ranks."""

from __future__ import annotations

import pytest

from reshard.errors import UsageError
from reshard.training.trainer_run import TrainerRun


def make_run(strategy, size):
    settings = {"fsdp_sharding_strategy": strategy, "fsdp_hybrid_size": size}
    return TrainerRun({"settings": settings})


@pytest.mark.parametrize(
    ("strategy", "size", "ranks", "mesh"),
    [
        ("FULL_SHARD", 2, 3, {"shard": 3}),
        ("HYBRID_SHARD", 2, 1, {"shard": 1}),
        ("HYBRID_SHARD", 2, 6, {"replicate": 3, "shard": 2}),
        ("_HYBRID_SHARD_ZERO2", 0, 6, {"replicate": 2, "shard": 3}),
        ("HYBRID_SHARD", 0, 3, {"replicate": 1, "shard": 3}),
    ],
)
def test_the_mesh_holds_every_rank(strategy, size, ranks, mesh):
    assert make_run(strategy, size).mesh(ranks) == mesh


def test_ranks_that_cannot_form_replicas_of_the_stated_size_are_refused():
    """A mesh of 1 x 2 for 3 ranks would have no file for the third one."""
    with pytest.raises(UsageError, match="3 ranks cannot form such replicas") as refused:
        make_run("HYBRID_SHARD", 2).mesh(3)
    assert "use a multiple of 2" in refused.value.remedy
