"""Train with any optimizer in real DeepSpeed, save, resume, and record the whole state.

What is told is found without a table of slots: every value of every state that the engine's
optimizer holds, gathered from the ranks and named by parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tests.judges import deepspeed_models, deepspeed_state, deepspeed_train, optimizers, ranks
from tests.judges.deepspeed_cases import Case
from tests.judges.deepspeed_worker import PRELOADED
from tests.judges.optimizers import Kind

STEPS, NEXT_STEPS = 3, 2
RECOMPUTED = ("RMS",)  # ranks have other values, which the next update replaces


def work(job: ranks.Job, rank: int) -> None:
    """Train and save, or load what the job names; train on."""
    kind: Kind = job.told["kind"]
    ranks.join_group(job, rank)
    deepspeed_train.start_rank()
    load: Path | None = job.told.get("load")
    universal = bool(job.told.get("universal"))
    engine, case = start(kind, job.world, job.out, 8 if load else 7, load if universal else None)
    run = deepspeed_train.Run(case, engine, [])
    told: dict[str, Any] = {}
    if load is None:
        told["losses"] = [deepspeed_train.train_step(run, step) for step in range(STEPS)]
        told["held"] = held(engine)
        directory = str(job.out / "run")
        engine.save_checkpoint(directory, exclude_frozen_parameters=kind.exclude_frozen)
    else:
        strict = not kind.exclude_frozen  # as HF Trainer loads a PEFT model
        path, _ = engine.load_checkpoint(str(load), load_module_strict=strict)
        assert path is not None
        if universal:
            deepspeed_train.end_sharing(engine.basic_optimizer)
        told["held"] = held(engine)
    first = engine.global_steps
    told["next"] = [deepspeed_train.train_step(run, first + step) for step in range(NEXT_STEPS)]
    told["after"] = held(engine)
    deepspeed_train.write_expected(told, job.out)


def start(kind: Kind, world: int, out: Path, seed: int, universal: Path | None) -> tuple[Any, Case]:
    """Make the engine."""
    case = kind.case()
    config = deepspeed_train.resolved_config(case, world, out)
    model = deepspeed_train.build_model(case, config, seed)
    if universal:
        config["checkpoint"] = {"load_universal": True}
        deepspeed_train.give_untrained(model, universal)
    groups = deepspeed_models.param_groups(model, kind.groups)
    optimizer = optimizers.made(kind.optimizer, groups)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=groups, config=config
    )
    return engine, case


Held = dict[str, dict[str, Any]]


def held(engine: Any) -> Held:
    """Return name of a value -> fqn -> value of all ranks, on rank 0; ``weight`` is the master."""
    names = {id(p): n for n, p in deepspeed_state.optimized(engine.module).items()}
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        own = _of_stage_3(optimizer, names)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        own = _of_flat_groups(optimizer, names)
    else:
        return _whole(engine, names)
    return _joined(ranks.gather_states(own), deepspeed_state.optimized(engine.module))


def _of_flat_groups(optimizer: Any, names: dict[int, str]) -> list[tuple[str, str, int, Any]]:
    """Return (value, fqn, first element in the parameter or -1, piece) of this rank."""
    told: list[tuple[str, str, int, Any]] = []
    groups = zip(
        optimizer.bit16_groups,
        optimizer.bit16_groups_flat,
        optimizer.single_partition_of_fp32_groups,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for number, (params, flat, piece, group) in enumerate(groups):
        low = dist.get_rank(group) * piece.numel()
        inside = getattr(optimizer, "params_in_partition", {number: []})[number]
        for name, value in {"weight": piece, **optimizer.optimizer.state[piece]}.items():
            if not torch.is_tensor(value) or value.dim() == 0:
                told += [(name, names[id(p)], -1, float(value)) for p in params]
            elif value.numel() == piece.numel():
                for p in params:
                    start = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
                    first, last = max(start, low), min(start + p.numel(), low + piece.numel())
                    if first < last:
                        part = value.detach()[first - low : last - low].clone()
                        told.append((name, names[id(p)], first - start, part))
            else:
                at = 0
                for p in inside:
                    told.append((name, names[id(p)], 0, value[at : at + p.numel()].clone()))
                    at += p.numel()
                assert at == value.numel()
    return told


def _of_stage_3(optimizer: Any, names: dict[int, str]) -> list[tuple[str, str, int, Any]]:
    told: list[tuple[str, str, int, Any]] = []
    rank = dist.get_rank()
    for params, piece in zip(
        optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        for name, value in {"weight": piece, **optimizer.optimizer.state[piece]}.items():
            at = 0
            for p in params:
                size = p.partition_numel()
                if not torch.is_tensor(value) or value.dim() == 0:
                    told.append((name, names[id(p)], -1, float(value)))
                else:
                    assert value.numel() == piece.numel(), name
                    kept = min(size, max(p.ds_numel - rank * size, 0))
                    part = value.detach()[at : at + kept].clone()
                    told.append((name, names[id(p)], rank * size, part))
                at += size
    return told


def _joined(every: list[list[tuple[str, str, int, Any]]], params: dict[str, Any]) -> Held:
    found: Held = {}
    for name, fqn, start, value in (each for own in every for each in own):
        if name in RECOMPUTED:
            continue
        values = found.setdefault(name, {})
        if start < 0:
            assert values.setdefault(fqn, value) == value, (name, fqn)
            continue
        param = params[fqn]
        numel = getattr(param, "ds_numel", None) or param.numel()
        whole = values.setdefault(fqn, torch.full((numel,), float("nan")))
        before = whole[start : start + value.numel()]
        known = ~before.isnan()
        assert torch.equal(before[known], value.float()[known]), (name, fqn)
        before.copy_(value)
    return found


def _whole(engine: Any, names: dict[int, str]) -> Held:
    optimizer, found = engine.optimizer, dict[str, dict[str, Any]]()
    pairs = [(p, p) for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        pairs = [pair for lows, highs in groups for pair in zip(lows, highs, strict=True)]
    for low, high in pairs:
        if id(low) not in names:
            continue
        for name, value in {"weight": high, **optimizer.state[high]}.items():
            told = value.detach().clone().flatten() if torch.is_tensor(value) else float(value)
            told = float(value) if torch.is_tensor(value) and value.dim() == 0 else told
            found.setdefault(name, {})[names[id(low)]] = told
    return found


if __name__ == "__main__":
    torch._dynamo.config.disable = True  # Muon's kernels run as they are: a compiler takes minutes
    ranks.serve(work, PRELOADED)
