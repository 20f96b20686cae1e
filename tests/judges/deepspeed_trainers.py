"""Checkpoints that the transformers Trainer and accelerate write around DeepSpeed's own.

The Trainer's lie in ``run/checkpoint-N/global_stepN``, accelerate's in ``run/pytorch_model``; both
with further files (trainer_state.json, random states) that a reader of the DeepSpeed part must
pass over. The engine inside is the real one, so its state is gathered as everywhere else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.judges import deepspeed_models as models
from tests.judges import deepspeed_state, hf_trainer
from tests.judges import deepspeed_train as train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judges.deepspeed_cases import Case


def configure_accelerate() -> None:
    """Set what ``accelerate launch`` sets in the environment, with the only backend of CPUs.

    Left to itself accelerate finds no backend beside DeepSpeed on a CPU and counts one process.
    """
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    if state.num_processes != dist.get_world_size():
        raise AssertionError(f"accelerate sees {state.num_processes} processes")


def make_trainer(case: Case, out: Path) -> None:
    """Return the transformers Trainer with a DeepSpeed config full of ``auto``."""
    configure_accelerate()
    arguments = hf_trainer.arguments(
        out / "run",
        case.steps,
        accelerator_config={"use_configured_state": True},
        deepspeed=case.config,
        fp16=True,
        save_steps=case.steps,
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=1,
        per_device_train_batch_size=models.GLOBAL_BATCH // case.world,
        seed=7,
    )
    model = train.build_model(case, case.config)
    rows = torch.cat([models.global_batch(step, 0, 1) for step in range(case.steps)])
    trainer = hf_trainer.train(model, arguments, rows)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    _finish(case, trainer.model_wrapped, logged, out)


def make_accelerate(case: Case, out: Path) -> None:
    """Save with Accelerate's ``save_state`` and its DeepSpeed plugin."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    configure_accelerate()
    config = train.resolved_config(case, case.world, out)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = train.build_model(case, config)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if "optimizer" in config:
        optimizer: Any = DummyOptim(trainable)
    else:
        optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    engine, _ = accelerator.prepare(model, optimizer)
    run = train.Run(case, engine, [trainable])
    losses = [train.train_step(run, step) for step in range(case.steps)]
    accelerator.save_state(str(out / "run"))
    _finish(case, engine, losses, out)


def _finish(case: Case, engine: Any, losses: list[float], out: Path) -> None:
    trainable = [p for p in engine.module.parameters() if p.requires_grad]
    run = train.Run(case, engine, [trainable])
    expected = train.describe(run, deepspeed_state.snapshot(engine, case.slots))
    if dist.get_rank() == 0:
        engine.module.config.save_pretrained(out / "run")
    train.write_expected(expected | {"losses": losses}, out)
