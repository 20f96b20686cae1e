"""The files that trainers of other libraries keep beside weights and optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import lr_scheduler

import reshard
from reshard import formats
from reshard.formats.trainers import hf_trainer
from reshard.training.state import build_writable_state

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama-zero3-4ranks"


def test_each_of_lightnings_schedulers_becomes_a_file_of_accelerate(tmp_path):
    """Lightning saves a list; Accelerate loads scheduler.bin, scheduler_1.bin and so on."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        lr_scheduler.StepLR(optimizer, 2),
        lr_scheduler.LinearLR(optimizer, total_iters=5),
    ]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    saved = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "pytorch-lightning_version": "2.6.5",
        "global_step": 1,
        "epoch": 0,
    }
    torch.save(saved, tmp_path / "last.ckpt")
    reshard.split(tmp_path / "last.ckpt", tmp_path / "out", to="accelerate")
    names = ["scheduler.bin", "scheduler_1.bin"]
    loaded = [torch.load(tmp_path / "out" / name, weights_only=False) for name in names]
    assert loaded == saved["lr_schedulers"]
    assert not (tmp_path / "out" / "scheduler_2.bin").exists()


def test_a_new_scheduler_of_the_trainer_does_not_count_skipped_steps():
    """Neither does Accelerate's, which the Trainer steps with the optimizer."""
    manifest = formats.read(EXAMPLE)
    train = replace(manifest.train, skipped_steps=1, scheduler=None)
    state = build_writable_state(replace(manifest, train=train))
    made = hf_trainer.build_scheduler(state)
    assert (state.step, made["last_epoch"], made["_step_count"]) == (4, 3, 4)
