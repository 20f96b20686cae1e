"""Bytes of model state on a rank, predicted and measured.

With P parameters on N ranks, 16-bit training with Adam keeps 2P of parameters, 2P of gradients and
12P of fp32 masters and moments; a stage divides by N what it partitions (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from trainer.core.data import Corpus
from trainer.core.engine import ModelState
from trainer.core.ranks import Ranks
from trainer.core.settings import ZERO
from trainer.core.strategies import build_engine
from trainer.settings import Settings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER = 12
"""Master, exp_avg, exp_avg_sq: 4 bytes each."""


def predict(settings: Settings, numel: int) -> ModelState:
    """Return the bytes of model state for ``numel`` parameters, without padding."""
    stage, world = settings.zero_stage, settings.nproc
    parameters = BYTES[settings.precision] * numel
    gradients = BYTES[settings.grad_dtype if stage >= 2 else settings.precision] * numel
    optimizer = OPTIMIZER * numel
    return ModelState(
        parameters=parameters // world if stage >= 3 else parameters,
        gradients=gradients // world if stage >= 2 else gradients,
        optimizer=optimizer // world if stage >= 1 else optimizer,
        accumulators=0 if stage >= 2 else BYTES[settings.grad_dtype] * numel // world,
    )


def format_formula(settings: Settings) -> str:
    """Return the prediction as a formula in P and N.

    >>> format_formula(Settings(strategy="zero2", precision="bf16", grad_dtype="bf16"))
    '2P + 14P/N'
    """
    state = predict(dataclasses.replace(settings, nproc=1), 1)
    parts = [state.parameters, state.gradients, state.optimizer]
    stages = (3, 2, 1)  # the stage from which each is divided
    divided = sum(
        part for part, stage in zip(parts, stages, strict=True) if settings.zero_stage >= stage
    )
    whole = sum(parts) - divided
    return " + ".join(f"{n}P{over}" for n, over in ((whole, ""), (divided, "/N")) if n)


def measure(settings: Settings, ranks: Ranks) -> tuple[int, ModelState]:
    """Return the number of parameters, and the largest state of a rank before the step."""
    engine = build_engine(settings, ranks)
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    tokens = corpus.get_samples(ranks.rank * settings.micro_batch, settings.micro_batch)
    engine.run_microbatch(tokens.to(ranks.device), active_ranks=ranks.world, last=True)
    numel = sum(value.numel() for _, value in engine.parameters())
    every = ranks.all_gather_objects(dataclasses.astuple(engine.measure_state()))
    engine.discard_gradients()
    return numel, ModelState(*(max(values) for values in zip(*every, strict=True)))


def report(settings: Settings, ranks: Ranks) -> None:
    """Print the table of all ZeRO stages, or of one FSDP strategy; rank 0 prints."""
    strategies = ZERO if settings.layout == "DeepSpeed" else (settings.strategy,)
    rows = []
    numel = 0
    for strategy in strategies:
        variant = _change_strategy(settings, strategy)
        numel, state = measure(variant, ranks)
        rows.append((variant, state))
        torch.cuda.empty_cache()
    if ranks.is_first:
        print(_format_table(settings, numel, rows))  # noqa: T201


def _change_strategy(settings: Settings, strategy: str) -> Settings:
    changes: dict[str, Any] = {"strategy": strategy}
    if strategy == "ddp":
        changes["offload_optimizer"] = "none"
    if strategy != "zero3":
        changes["offload_param"] = "none"
    return dataclasses.replace(settings, **changes)


def _format_table(settings: Settings, numel: int, rows: list[tuple[Settings, ModelState]]) -> str:
    lines = [
        (
            f"model state in bytes per rank: P = {numel:,} parameters, N = {settings.nproc} ranks, "
            f"{settings.precision}, gradients kept in {settings.grad_dtype}"
        ),
        (
            f"{'strategy':<9} {'textbook':<14} {'predicted':>13} {'measured':>13} {'ratio':>6}   "
            f"{'parameters':>12} {'gradients':>12} {'optimizer':>12} {'sums':>10}"
        ),
    ]
    for variant, state in rows:
        measured = state.parameters + state.gradients + state.optimizer
        parts = (
            f"{state.parameters:>12,} {state.gradients:>12,} {state.optimizer:>12,} "
            f"{state.accumulators:>10,}"
        )
        if variant.layout == "DeepSpeed":
            prediction = predict(variant, numel)
            expected = prediction.parameters + prediction.gradients + prediction.optimizer
            columns = f"{format_formula(variant):<14} {expected:>13,} {measured:>13,} "
            columns += f"{measured / expected:>6.3f}"
        else:
            columns = f"{'-':<14} {'-':>13} {measured:>13,} {'-':>6}"
        lines.append(f"{variant.strategy:<9} {columns}   {parts}")
    lines.append(
        "a ratio above 1 is padding to a multiple of the ranks; sums: the sums of gradients that "
        "ddp and zero1 keep at their owners, beside whole gradients"
    )
    return "\n".join(lines)
