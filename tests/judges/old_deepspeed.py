"""Train with an older DeepSpeed, save, load live into another engine, and train on with both.

A job is a function of (ranks, ...) for `worlds.run_in_turn`, in a process that called `enter`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from tests.judges import programs


def enter(program):
    """Import a DeepSpeed in the place of the one that is installed."""
    sys.path.insert(0, str(programs.FOLDER / program))
    import deepspeed.module_inject.layers
    import deepspeed.runtime.zero.stage3

    assert program == f"deepspeed-{deepspeed.__version__}"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def go_on(_ranks, place, stage, new_stage):
    """Return the losses of the run, those after the load, and the script's own value."""
    import deepspeed

    import reshard.deepspeed

    deepspeed.init_distributed("gloo")
    saved = _build(stage, 1)
    _train(saved, 0, 3)
    saved.save_checkpoint(place, client_state={"mine": 5})
    wanted = _train(saved, 3, 3)
    loaded = _build(new_stage, 2)
    _, client_state = reshard.deepspeed.load_checkpoint(loaded, place)
    return wanted, _train(loaded, 3, 3), client_state["mine"]


def _build(stage, seed):
    import deepspeed

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            # A step gathers the persistent parameters of stage 3 at once, and these versions wait
            # only for the last gather (`_allgather_params_coalesced`): under gloo, which has two
            # threads, the others may be unfinished, and training goes on with what memory held.
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": True},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _train(engine, first, steps):
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
