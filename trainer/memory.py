"""Bytes of model state on a rank, by the textbook and as measured.

With P parameters on N ranks, 16-bit training with Adam keeps 2P of parameters, 2P of gradients and
12P of fp32 masters and moments; a stage divides by N what it cuts (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from trainer import engines
from trainer.data import Corpus
from trainer.engines.base import ModelState
from trainer.ranks import Ranks
from trainer.settings import ZERO, Settings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER = 12
"""Master, exp_avg, exp_avg_sq: 4 bytes each."""


def predicted(settings: Settings, numel: int) -> ModelState:
    """Model state of ``settings.strategy`` for ``numel`` parameters, padding aside, in bytes."""
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


def formula(settings: Settings) -> str:
    """The same in P and N.

    >>> formula(Settings(strategy="zero2", precision="bf16", grad_dtype="bf16"))
    '2P + 14P/N'
    """
    state = predicted(dataclasses.replace(settings, nproc=1), 1)
    parts = [state.parameters, state.gradients, state.optimizer]
    cut = (3, 2, 1)  # the stage from which each is divided
    divided = sum(part for part, at in zip(parts, cut, strict=True) if settings.zero_stage >= at)
    whole = sum(parts) - divided
    return " + ".join(f"{n}P{over}" for n, over in ((whole, ""), (divided, "/N")) if n)


def measure(settings: Settings, ranks: Ranks) -> tuple[int, ModelState]:
    """Parameters, and what the rank with most keeps between backward pass and step."""
    engine = engines.build(settings, ranks)
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    place = settings.grid.data_of(ranks.rank)
    tokens = corpus.samples(place * settings.micro_batch, settings.micro_batch)
    times = settings.accumulation if settings.pp > 1 else 1  # a schedule has its number of them
    for number in range(1, times + 1):
        engine.microbatch(tokens.to(ranks.device), last=number == times)
    numel = sum(value.numel() for _, value in engine.parameters())
    every = ranks.gather(dataclasses.astuple(engine.model_state()))
    engine.discard()
    return numel, ModelState(*(max(values) for values in zip(*every, strict=True)))


def report(settings: Settings, ranks: Ranks) -> None:
    """Print the table of all ZeRO stages, or of one FSDP strategy; rank 0 prints."""
    strategies = ZERO if settings.layout == "DeepSpeed" else (settings.strategy,)
    rows = []
    numel = 0
    for strategy in strategies:
        own = _fitting(settings, strategy)
        numel, state = measure(own, ranks)
        rows.append((own, state))
        torch.cuda.empty_cache()
    if ranks.first:
        print(_table(settings, numel, rows))  # noqa: T201


def _fitting(settings: Settings, strategy: str) -> Settings:
    """These settings with another strategy; without the offload that it cannot do."""
    changes: dict[str, Any] = {"strategy": strategy}
    if strategy == "ddp":
        changes["offload_optimizer"] = "none"
    if strategy != "zero3":
        changes["offload_param"] = "none"
    return dataclasses.replace(settings, **changes)


def _table(settings: Settings, numel: int, rows: list[tuple[Settings, ModelState]]) -> str:
    lines = [
        (
            f"model state in bytes a rank: P = {numel:,} parameters, N = {settings.nproc} ranks, "
            f"{settings.precision}, gradients kept in {settings.grad_dtype}"
        ),
        (
            f"{'strategy':<9} {'textbook':<14} {'predicted':>13} {'measured':>13} {'ratio':>6}   "
            f"{'parameters':>12} {'gradients':>12} {'optimizer':>12} {'sums':>10}"
        ),
    ]
    for own, state in rows:
        measured = state.parameters + state.gradients + state.optimizer
        parts = (
            f"{state.parameters:>12,} {state.gradients:>12,} {state.optimizer:>12,} "
            f"{state.accumulators:>10,}"
        )
        if own.layout == "DeepSpeed" and own.engine == "native":
            textbook = predicted(own, numel)
            expected = textbook.parameters + textbook.gradients + textbook.optimizer
            told = f"{formula(own):<14} {expected:>13,} {measured:>13,} {measured / expected:>6.3f}"
        else:
            told = f"{'-':<14} {'-':>13} {measured:>13,} {'-':>6}"
        lines.append(f"{own.strategy:<9} {told}   {parts}")
    lines.append(
        "measured / predicted above 1 is padding to a multiple of the ranks; sums: the additions "
        "of gradients that ddp and zero1 do at their owners, beside whole gradients"
    )
    return "\n".join(lines)
