"""Live FSDP 2 with transformers models whose files have other names and shapes than in memory.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard.dcp
from tests.model.test_published import make_model

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(name, ranks):
    """Shard the model and its AdamW over all ranks."""
    model = make_model(name)
    mesh = init_device_mesh("cpu", (ranks.world,))
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(ranks, name, place):
    """Train two steps, and save a DCP, what `save_pretrained` writes, and the moments."""
    model, optimizer = shard(name, ranks)
    for step in range(2):
        torch.manual_seed(10 * step + ranks.rank)
        tokens = torch.randint(0, 40, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    place = Path(place)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=place / "run")
    weights = get_model_state_dict(model, options=FULL)
    moments = get_optimizer_state_dict(model, optimizer, options=FULL)
    if ranks.rank == 0:
        whole = make_model(name)
        whole.load_state_dict(weights)
        whole.save_pretrained(place / "published")
        whole.config.save_pretrained(place / "run")
        slots = {fqn: slot["exp_avg"] for fqn, slot in moments["state"].items()}
        torch.save({"weights": whole.state_dict(), "exp_avg": slots}, place / "expected.pt")


def load(ranks, name, place, source):
    """Return names of weights of a live model that differ after it loaded a checkpoint.

    Args:
        source: a directory to load; a published one is read by `reshard.dcp.StorageReader`.
    """
    model, _ = shard(name, ranks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    state = {"model": get_model_state_dict(model)}
    if (Path(source) / ".metadata").is_file():
        dcp.load(state, checkpoint_id=source)
    else:
        dcp.load(state, storage_reader=reshard.dcp.StorageReader(source))
    loaded = get_model_state_dict(model, options=FULL)
    expected = torch.load(Path(place) / "expected.pt")["weights"]
    return [fqn for fqn, value in loaded.items() if not torch.equal(value, expected[fqn])]
