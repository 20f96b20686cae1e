"""Train with the importable DeepSpeed, save, load live into another engine, and train on with both.

    torchrun --nproc-per-node 2 -m tests.judges.old_deepspeed PLACE STAGE NEW_STAGE

Rank 0 writes the losses of both engines to ``losses.json`` in the place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import reshard.deepspeed


def build(stage, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, first, steps):
    losses = []
    for step in range(first, first + steps):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = engine(batch.chunk(2)[dist.get_rank()].bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


if __name__ == "__main__":
    place, stage, new_stage = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    saved = build(int(stage), 1)
    train(saved, 0, 3)
    saved.save_checkpoint(place, client_state={"mine": 5})
    wanted = train(saved, 3, 3)
    loaded = build(int(new_stage), 2)
    _, client_state = reshard.deepspeed.load_checkpoint(loaded, place)
    found = train(loaded, 3, 3)
    if dist.get_rank() == 0:
        losses = {"wanted": wanted, "found": found, "mine": client_state["mine"]}
        Path(place, "losses.json").write_text(json.dumps(losses))
