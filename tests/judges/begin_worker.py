"""Live FSDP 2 that begins from a model's weights, and from what reshard made of them.

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
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import LlamaForCausalLM

from tests.judges import dcp_reader_worker as reader

GROUPS = [  # as a file of groups says it
    {"match": "norm", "weight_decay": 0.0, "lr": 2e-3, "betas": [0.8, 0.95]},
    {"weight_decay": 0.1, "lr": 1e-3, "eps": 1e-6},
]


def optimizer_of(model, groups):
    """Return an AdamW of those groups, with torch's defaults for what they lack."""
    named = dict(model.named_parameters())
    norms = [name for name in named if "norm" in name]
    members = [norms, [name for name in named if name not in norms]]
    return torch.optim.AdamW(
        [
            {**{key: value for key, value in group.items() if key != "match"}}
            | {"params": [named[name] for name in names]}
            for group, names in zip(groups, members, strict=True)
        ],
        lr=0.5,
    )


def fresh(ranks, weights, steps):
    """Return the losses of a run that begins from a Hugging Face directory."""
    model = LlamaForCausalLM.from_pretrained(
        weights, dtype=torch.float32, attn_implementation="eager"
    )
    model = reader.sharded("fsdp2", ranks, model)
    made = optimizer_of(model, GROUPS)
    return reader.train(ranks, "fsdp2", model, made, 0, steps)


def from_dcp(ranks, weights, place, steps):
    """Return the losses of a model that loaded a DCP directory in place of other values."""
    model = reader.sharded("fsdp2", ranks, reader.llama(weights))
    made = optimizer_of(model, [{"lr": 0.3, "weight_decay": 0.7, "eps": 0.1}] * 2)
    _load(model, made, place)
    return reader.train(ranks, "fsdp2", model, made, 0, steps)


def regrouped(ranks, weights, place, steps, thaws):
    """Save after some steps, train more or fewer parameters from then on, and return the losses.

    Args:
        thaws: whether norms alone are trained before, or after; the others begin or end.
    """
    model = reader.sharded("fsdp2", ranks, reader.llama(weights))
    made = optimizer_of(model, GROUPS)
    other = made.param_groups[1]
    if thaws:
        made.param_groups.pop()
        _train_group(other, trained=False)
    reader.train(ranks, "fsdp2", model, made, 0, steps)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, made)}
    dcp.save(state, checkpoint_id=place)
    if thaws:
        made.param_groups.append(other)
    else:
        made.param_groups.pop()
    _train_group(other, trained=thaws)
    return reader.train(ranks, "fsdp2", model, made, steps, steps)


def from_regrouped(ranks, weights, place, steps, thaws):
    """Return the losses of a model that loaded the DCP directory with the groups after that."""
    model = reader.sharded("fsdp2", ranks, reader.llama(weights))
    made = optimizer_of(model, [{"lr": 0.3, "weight_decay": 0.7, "eps": 0.1}] * 2)
    if not thaws:
        _train_group(made.param_groups.pop(), trained=False)
    _load(model, made, place)
    return reader.train(ranks, "fsdp2", model, made, steps, steps)


def _train_group(group, *, trained):
    for parameter in group["params"]:
        parameter.requires_grad_(trained)
        parameter.grad = None


def _load(model, optimizer, place):
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=place)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def from_ranks(ranks, weights, place, steps):
    """Return the losses of a model that loaded a file per rank in place of other values."""
    model = reader.sharded("fsdp2", ranks, reader.llama(weights))
    made = optimizer_of(model, [{"lr": 0.3, "weight_decay": 0.7, "eps": 0.1}] * 2)
    model.load_state_dict(torch.load(Path(place) / f"model_rank{ranks.rank}.pt"))
    made.load_state_dict(torch.load(Path(place) / f"optim_rank{ranks.rank}.pt"))
    return reader.train(ranks, "fsdp2", model, made, 0, steps)


def weights_of_dcp(ranks, weights, place):
    """Return the weights of a model that loaded a DCP directory of weights."""
    model = reader.sharded("fsdp2", ranks, reader.llama(weights))
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=place)
    set_model_state_dict(model, state["model"])
    return _gather(model)


def weights_of_ranks(ranks, weights, place):
    """Return the weights of a model that loaded a file per rank."""
    model = reader.sharded("fsdp2", ranks, reader.llama(weights))
    model.load_state_dict(torch.load(Path(place) / f"model_rank{ranks.rank}.pt"))
    return _gather(model)


def _gather(model):
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.numpy() for name, value in whole.items()}
