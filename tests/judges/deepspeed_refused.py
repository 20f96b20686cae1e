"""Checkpoints with experts or pipeline stages in files of their own, which reshard refuses.

No full reference is gathered for them: a refusal needs only the files and that training ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.judges import deepspeed_models as models
from tests.judges import deepspeed_train as train

if TYPE_CHECKING:
    from collections.abc import Iterator
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


def make_pipeline(case: Case, out: Path) -> None:
    """Two stages of an embedding, linear layers and a head."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(7)
    layers = [
        LayerSpec(nn.Embedding, models.VOCAB, 16),
        *(LayerSpec(nn.Linear, 16, 16) for _ in range(3)),
        LayerSpec(nn.Linear, 16, models.VOCAB),
    ]
    model = PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=_token_loss)
    config = train.resolved_config(case, 1, out)
    config["train_micro_batch_size_per_gpu"] = models.GLOBAL_BATCH // 2
    config["gradient_accumulation_steps"] = 2
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    losses = [float(engine.train_batch(data_iter=_halves(step))) for step in range(case.steps)]
    engine.save_checkpoint(str(out / "run"))
    train.write_reference({"losses": losses, "refused": "pipeline"}, out)


def _halves(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batch as two micro batches of (input, label)."""
    return iter([(half, half) for half in models.global_batch(step, 0, 1).chunk(2)])


def _token_loss(logits: Tensor, labels: Tensor) -> Any:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
