"""OLMo-core's own Checkpointer: train and save, load and train on.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.judges import programs
from tests.judges.library_stubs import stand_in

PROGRAM = "ai2-olmo-core"
MISSING = ("cached_path", "dill", "importlib_resources", "pandas")
STEPS = 3


def enter():
    """Import OLMo-core once."""
    programs.enter(PROGRAM)
    with stand_in(MISSING):
        import cached_path

        cached_path.cached_path = lambda path, **_options: Path(path)
        import olmo_core.train.checkpoint
        import olmo_core.train.train_module  # noqa: F401


def save(_ranks, path):
    """Return the losses of the steps after the save, and the whole state."""
    checkpointer, module = _build(path)
    _train(module, 0)
    state = _collect(module)
    checkpointer.save(path, module, {"global_step": STEPS, "rank": dist.get_rank()})
    return _train(module, STEPS), state


def resume(_ranks, path):
    """Return the losses after a load, the whole state, and the rank that each trainer's is of."""
    checkpointer, module = _build(path)
    assert checkpointer.latest_checkpoint(path.parent) == str(path)
    train = checkpointer.load(path, module, load_trainer_state=True)
    state = _collect(module)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, train["rank"])
    return _train(module, train["global_step"]), state, ranks


def _build(path):
    from olmo_core.train.checkpoint import Checkpointer
    from olmo_core.train.train_module import BasicTrainModule

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    module = BasicTrainModule(model, torch.optim.AdamW(groups, lr=0.05), 8)
    return Checkpointer(work_dir=path.parent / "work"), module


def _train(module, first):
    """Train on the same batch on every rank, so that the losses are those of any number of them."""
    losses = []
    for step in range(first, first + STEPS):
        seeded = torch.Generator().manual_seed(step)
        inputs, wanted = (torch.randn(4, width, generator=seeded) for width in (6, 3))
        loss = (module.model(inputs) - wanted).square().mean()
        module.optim.zero_grad()
        loss.backward()
        module.optim.step()
        losses.append(loss.item())
    return losses


def _collect(module):
    weights = get_model_state_dict(module.model)
    slots = get_optimizer_state_dict(module.model, module.optim)["state"]
    named = {(fqn, slot): each for fqn, state in slots.items() for slot, each in state.items()}
    whole = {**{(fqn, "param"): each for fqn, each in weights.items()}, **named}
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).tolist()
        for name, each in whole.items()
    }
