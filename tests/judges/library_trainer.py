"""Checkpoints of the transformers Trainer: ``checkpoint-2`` and ``checkpoint-4`` in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.judges import hf_trainer, library_state
from tests.judges import library_models as models
from tests.judges.device import IS_GPU
from tests.judges.library_cpu import pass_for_gpus

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import Trainer

    from tests.judges.library_cases import Case

STEPS = 4


def make(case: Case, ckpt: Path) -> library_state.State:
    """Train four steps, which leaves two checkpoints, the last of which is told."""
    trainer = train(case, models.build(case.factory), ckpt)
    model = trainer.model_wrapped if case.world > 1 else trainer.model
    return tell(trainer, models.build(case.factory), model)


def train(case: Case, model: nn.Module, ckpt: Path) -> Trainer:
    """Return the Trainer after its run."""
    settings: dict[str, Any] = {"use_cpu": not IS_GPU}
    if "fsdp" in case.how:
        pass_for_gpus()
        settings = {
            "fsdp": True,
            "fsdp_config": {
                **case.how["fsdp"],
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "sync_module_states": False,  # it asks for a GPU
            },
            "accelerator_config": {"use_configured_state": True},
        }
    elif case.world > 1:
        settings["ddp_backend"] = "gloo"
    arguments = hf_trainer.arguments(
        ckpt,
        STEPS,
        save_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        per_device_train_batch_size=models.BATCH // case.world,
        **settings,
    )
    return hf_trainer.train(model, arguments, models.tokens(STEPS * models.BATCH))


def tell(trainer: Trainer, fresh: nn.Module, model: nn.Module) -> library_state.State:
    """Return the state of the Trainer's objects."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return library_state.read_state(
        fresh, model, optimizer, trainer.lr_scheduler, trainer.state.global_step
    )
