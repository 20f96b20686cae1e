"""The package ``megatron-fsdp``: train and save, load and train on.

Each job is a function of (ranks, ...) for `worlds.run_in_turn` and returns plain values.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.judges import programs
from tests.judges.ranks import mean_over_ranks

PROGRAM = "megatron-fsdp"
STEPS = 2


class Block(nn.Module):
    """A unit of which no size divides by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 53)
        self.down = nn.Linear(53, 10, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def enter():
    """Import the program, which prefers megatron-core's own classes, and needs CUDA's names."""
    programs.enter(PROGRAM)
    sys.modules["megatron.core"] = None
    named = ("Stream", "Event", "current_stream", "synchronize", "empty_cache")
    cuda = {name: mock.MagicMock() for name in named}
    cuda |= {"stream": lambda _: nullcontext(), "current_device": lambda: 0}
    mock.patch.multiple(torch.cuda, **cuda).start()
    mock.patch.multiple(torch.Tensor, cuda=lambda own: own, record_stream=lambda *_: None).start()
    from megatron_fsdp import param_and_grad_buffer

    param_and_grad_buffer.gradient_reduce_preprocessing = _scale  # gloo has no PREMUL_SUM


def _scale(gradient, factor, _config):
    gradient.mul_(1.0 if factor is None else factor)
    return dist.ReduceOp.SUM


def save(ranks, path, replicas):
    """Return the losses of the steps after the save, and the whole state."""
    model, optimizer = _build(ranks, replicas, 7)
    _train(ranks, model, optimizer, 0)
    dcp.save(_collect(model, optimizer), checkpoint_id=path)
    return _gather(model, optimizer), _train(ranks, model, optimizer, STEPS)


def resume(ranks, path, replicas):
    """Return the losses after a load, and the whole state."""
    model, optimizer = _build(ranks, replicas, 99)
    state = _collect(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    return _gather(model, optimizer), _train(ranks, model, optimizer, STEPS)


def _collect(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _build(ranks, replicas, seed):
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    torch.manual_seed(seed)
    sizes = (replicas, ranks.world // replicas, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "dp", "tp"))
    mesh["outer", "dp"]._flatten("all")
    hybrid = {"dp_outer_dim": "outer", "hybrid_fsdp_group": mesh["all"].get_group()}
    model = fully_shard_model(
        nn.Sequential(nn.Embedding(37, 10), Block(), Block(), nn.Linear(10, 37)),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        device=torch.device("cpu"),
        **(hybrid if replicas > 1 else {}),
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _train(ranks, model, optimizer, first):
    losses = []
    for step in range(first, first + STEPS):
        seeded = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 37, (12, 8), generator=seeded).chunk(ranks.world)[ranks.rank]
        logits = model(tokens)[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss, ranks.world))
    return losses


def _gather(model, optimizer):
    """Return each whole tensor from the ranks' parts; parts at the same place must be equal."""
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    own = {}
    for name, parameter in model.module.named_parameters():
        start = gather_and_compute_chunk_metadata(parameter).offsets
        slots = optimizer.state.get(parameter, {})
        for kind, value in {"param": parameter, **slots}.items():
            if isinstance(value, DTensor) and value.to_local().numel():
                own[name, kind] = (value.shape, start, value.to_local().detach())
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    full = {}
    for key, (shape, start, part) in (item for each in parts for item in each.items()):
        block = tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))
        whole = full.setdefault(key, torch.full(shape, torch.nan))
        assert (torch.isnan(whole[block]) | (whole[block] == part)).all(), f"{key} differs"
        whole[block] = part
    return {key: value.tolist() for key, value in full.items()}
