"""The files that trainers of other libraries keep beside weights and optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler

import reshard
from reshard import formats
from reshard.checks.identity.counters import find_counter_conflicts
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


@pytest.mark.parametrize(("counted", "fits"), [(8, True), (12, True), (7, False), (13, False)])
def test_lightning_counts_the_updates_of_all_optimizers(counted, fits, tmp_path):
    """A GAN's generator was updated 4 times, its discriminator 8 times."""
    model = nn.ModuleDict({"gen": nn.Linear(2, 3), "disc": nn.Linear(3, 1)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers = {name: torch.optim.AdamW(model[name].parameters()) for name in model}
    for name, updates in (("gen", 4), ("disc", 8)):
        for _ in range(updates):
            optimizers[name].step()
    saved = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers.values()],
        "pytorch-lightning_version": "2.6.5",
        "global_step": counted,
    }
    torch.save(saved, tmp_path / "last.ckpt")
    assert (not find_counter_conflicts(formats.read(tmp_path / "last.ckpt"))) == fits


def test_a_new_scheduler_of_the_trainer_does_not_count_skipped_steps():
    """Neither does Accelerate's, which the Trainer steps with the optimizer."""
    manifest = formats.read(EXAMPLE)
    train = replace(manifest.train, skipped_steps=1, scheduler=None)
    state = build_writable_state(replace(manifest, train=train))
    made = hf_trainer.build_scheduler(state)
    assert (state.step, made["last_epoch"], made["_step_count"]) == (4, 3, 4)


def test_micro_batches_of_accelerate_are_not_taken_for_steps(tmp_path):
    """The optimizer is left out here, because nothing names its parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(3):
        optimizer.step()
    run = tmp_path / "checkpoint-3"
    run.mkdir()
    save_file(model.state_dict(), run / "model.safetensors")
    torch.save(optimizer.state_dict(), run / "optimizer.bin")
    torch.save({"step": 1}, run / "random_states_0.pkl")
    found = reshard.inspect(run).manifest
    assert found.train.step is None
    assert found.train.opaque == {"accelerate's micro batches": 1}
    assert not find_counter_conflicts(found)


@pytest.mark.parametrize("to", ["accelerate", "verl"])
def test_a_scheduler_of_torch_gets_no_count_of_deepspeeds(to, tmp_path):
    """A scheduler of torch takes any state, and would begin anew without an error."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved | {"scheduler": {"last_batch_iteration": 0}}, tmp_path / "a.pt")
    report = reshard.split(tmp_path / "a.pt", tmp_path / "out", to=to)
    assert "not copied: scheduler" in report.notes
    assert not (tmp_path / "out" / "scheduler.bin").exists()
    for path in (tmp_path / "out").glob("extra_state*"):
        assert torch.load(path, weights_only=False)["lr_scheduler"] is None
