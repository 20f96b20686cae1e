"""The checkpoints of miles and slime, whose FSDP backends have the same files: save, and resume.

Both files are the same in miles-rl 0.0.2, miles 0.1.0 and slime 0.2.2.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.judges import programs

PROGRAM = "miles-rl"
STEPS = 3


def save(_ranks, root):
    """Save as an actor does; return what it then trains, and weights and moments at the save."""
    actor, checkpoint = _make_actor(root)
    _train(actor, 0)
    with _without_gpu():
        checkpoint.save(actor, STEPS - 1)
    slots = actor.optimizer.state_dict()["state"].values()
    names = [name for name, _ in actor.model.named_parameters()]
    state = {name: each.full_tensor().tolist() for name, each in actor.model.state_dict().items()}
    moments = [each["exp_avg"].full_tensor().tolist() for each in slots]
    return [*_train(actor, STEPS), state, dict(zip(names, moments, strict=True))]


def resume(_ranks, root, by_number):
    """Load as an actor does; return losses, steps and rates."""
    actor, checkpoint = _make_actor(root)
    actor.args.ckpt_step = STEPS if by_number else None
    with _without_gpu():
        checkpoint.finalize_load(actor, checkpoint.load(actor))
    assert actor.args.start_rollout_id == STEPS
    return _train(actor, actor.global_step)


def _without_gpu():
    return mock.patch.multiple(
        torch.cuda, synchronize=lambda: None, get_rng_state_all=list[torch.Tensor]
    )


def _import(name):
    path = programs.FOLDER / PROGRAM / f"miles/backends/experimental/fsdp_utils/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_actor(root):
    torch.manual_seed(dist.get_rank())  # each rank's own weights, if nothing is loaded
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    args = SimpleNamespace(save=str(root), load=str(root), start_rollout_id=None)
    scheduler = _import("lr_scheduler").FSDPLRScheduler(
        optimizer, 0.0, 0.01, 0.001, lr_warmup_steps=2, lr_decay_steps=9, lr_decay_style="cosine"
    )
    actor = SimpleNamespace(
        args=args,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        global_step=0,
        micro_step=0,
    )
    return actor, _import("checkpoint")


def _train(actor, first):
    losses, rates = [], []
    for step in range(first, first + STEPS):
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = actor.model(rows).square().mean()
        loss.backward()
        actor.optimizer.step()
        actor.lr_scheduler.step()
        actor.optimizer.zero_grad()
        actor.global_step += 1
        losses.append(loss.item())
        rates += actor.lr_scheduler.get_last_lr()
    return [losses, rates, actor.global_step]
