"""Checkpoints with experts in files of their own, which reshard refuses.

No full reference is gathered for them: a refusal needs only the files and that training ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deepspeed
import torch
import torch.distributed as dist

from tests.judges import deepspeed_models as models
from tests.judges import deepspeed_train as train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judges.deepspeed_cases import Case


def make_moe(case: Case, out: Path) -> None:
    """Two experts, one on each rank."""
    torch.manual_seed(7)
    model = models.MoeToy(expert_parallel=dist.get_world_size())
    config = train.resolved_config(case, dist.get_world_size(), out)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    run = train.Run(case, engine, [])
    losses = [train.train_step(run, step) for step in range(case.steps)]
    train.save(run, out / "run")
    train.write_reference({"losses": losses, "refused": "moe"}, out)
