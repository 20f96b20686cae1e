"""A DeepSpeed script as somebody else would write it; it knows nothing of ``trainer``."""

from __future__ import annotations

import re

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import AutoConfig, AutoModelForCausalLM

MOMENTS = ("exp_avg", "exp_avg_sq")


def start(model_path, config, frozen):
    """Return an engine with new weights; their seed is that of the trainer."""
    # It refuses fp16 on most CPUs, and torch computes it there all the same.
    type(get_accelerator()).is_fp16_supported = lambda _: True
    # Its collectives in shared memory would be compiled now.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def resume(engine, run, tag):
    """Load a checkpoint."""
    path, _ = engine.load_checkpoint(run, tag=tag)
    assert path is not None
    if engine.load_universal_checkpoint():
        # Stage 3 gives all groups the first one's numbers, and all tensors one step between them,
        # which torch then counts up for each.
        engine.basic_optimizer.param_groups[1]["weight_decay"] = 0.0
        for state in engine.basic_optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()


def train(engine, tokens):
    """Train on ``tokens`` (step, micro batch, sample, position); return losses, skipped steps."""
    losses, skipped = [], []
    # Stage 0 unscales fp16 gradients that it never scaled (engine.backward, 0.19.8).
    scale = getattr(engine.optimizer, "loss_scale_config", None) if engine.fp16_enabled() else None
    for step in tokens:
        total, before = torch.zeros(()), engine.skipped_steps
        for batch in step:
            loss = engine(input_ids=batch, labels=batch).loss.float()
            engine.backward(loss if scale is None else loss * scale.cur_scale)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / len(step) / dist.get_world_size())
        skipped.append(engine.skipped_steps > before)
    return losses, skipped


def read_counters(engine):
    """Return counters and hyper-parameters."""
    groups = engine.basic_optimizer.param_groups
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "last_batch_iteration": engine.lr_scheduler.last_batch_iteration,
        "scaler": _read_scaler(engine),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
    }


def _read_scaler(engine):
    """Return the loss scale and its counts; stage 0 has no hysteresis."""
    optimizer = engine.optimizer
    of_stage_0 = getattr(optimizer, "loss_scale_config", None)
    scaler = of_stage_0 or getattr(optimizer, "loss_scaler", None)
    if not engine.fp16_enabled():
        return None
    return {
        "scale": float(scaler.cur_scale),
        "iteration": scaler.cur_iter,
        "last_overflow": scaler.last_overflow_iter,
        "patience": 1 if of_stage_0 else scaler.cur_hysteresis,
    }


def read_state(engine):
    """Return ``parameters`` (fp32 masters, frozen ones as they are), exp_avg, exp_avg_sq, steps."""
    found = {key: {} for key in ("parameters", *MOMENTS)}
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # after the first step, else
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            found["parameters"][name] = _fp32(_gather(parameter))
            continue
        master = safe_get_full_fp32_param(parameter)
        own = _find_stage_0_master(optimizer, parameter) if master is None else None
        found["parameters"][name] = _fp32(own if master is None else master)
        for key in MOMENTS:
            whole = safe_get_full_optimizer_state(parameter, key)
            whole = engine.basic_optimizer.state[own][key] if whole is None else whole
            found[key][name] = _fp32(whole)
    states = engine.basic_optimizer.state.values()
    return {**found, "steps": {float(state["step"]) for state in states}}


def _fp32(tensor):
    return tensor.detach().float().clone().numpy()


def _gather(parameter):
    if not hasattr(parameter, "ds_id"):
        return parameter
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _find_stage_0_master(optimizer, parameter):
    """Return the fp32 copy of a 16-bit parameter, or the fp32 parameter itself."""
    for lows, highs in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
    ):
        for low, high in zip(lows, highs, strict=True):
            if low is parameter:
                return high
    return parameter
