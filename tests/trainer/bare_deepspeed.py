"""A DeepSpeed script as somebody else would write it; it knows nothing of ``trainer``."""

from __future__ import annotations

import re

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM


def train(run, tag, model_path, config, frozen, tokens):
    """Resume ``tag`` of ``run`` and train on ``tokens`` (step, micro batch, sample, position).

    Returns:
        The counters of the engine after loading, and the mean loss of each step.
    """
    # Other weights than those to be loaded; but a universal checkpoint does not hold frozen ones.
    torch.manual_seed(0 if "checkpoint" in config else 123)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    path, _ = engine.load_checkpoint(run, tag=tag)
    assert path is not None
    losses, loaded = [], read_counters(engine)
    if "checkpoint" in config:
        # Stage 3 gives all groups the first one's numbers, and all tensors one step between them,
        # which torch then counts up for each.
        engine.basic_optimizer.param_groups[1]["weight_decay"] = 0.0
        for state in engine.basic_optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()
    for step in tokens:
        total = torch.zeros(())
        for batch in step:
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / len(step) / dist.get_world_size())
    return loaded, losses


def read_counters(engine):
    """Return counters and hyper-parameters."""
    groups = engine.basic_optimizer.param_groups
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "last_batch_iteration": engine.lr_scheduler.last_batch_iteration,
        "scaler": dict(vars(scaler)) if scaler else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
    }
