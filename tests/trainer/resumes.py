"""Resumes of the trainer from one checkpoint: what each rank holds then, and the next losses."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

STEPS = 2


def resume_all(ranks, jobs):
    """Return what `_resume` returns for each job, a dict of chosen settings."""
    from trainer.core import model_config

    model_config.VOCABULARY = 90  # the models of the judges are smaller; so are the bytes of TEXT
    return [_resume(ranks, dict(job)) for job in jobs]


def _resume(ranks, chosen) -> dict[str, Any]:
    """Resume once; return the progress, a hash of this rank's state, and the next losses."""
    from trainer.checkpoint import saving, state
    from trainer.core.data import Corpus
    from trainer.core.loop import Progress, train
    from trainer.core.strategies import build_engine
    from trainer.resolve import resolve

    chosen = {**state.read_inherited(chosen["resume"], None), **chosen}
    settings = resolve({**chosen, "steps": STEPS}, ranks.world)
    engine = build_engine(settings, ranks)
    source = saving.find_source(settings, ranks)
    progress = saving.resume(source, settings, engine).progress
    found = {"progress": asdict(progress), "scaler": asdict(engine.scaler), "state": _hash(engine)}
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    steps = train(settings, ranks, engine, corpus, Progress())
    return {**found, "losses": [step.losses for step in steps]}


def _hash(engine) -> str:
    """Hash the masters, moments and steps of this rank."""
    digest = hashlib.sha256()
    for tensor in _list_state(engine):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _list_state(engine):
    if hasattr(engine, "shard"):
        for state in engine.shard.states:
            yield from (state.master, state.exp_avg, state.exp_avg_sq, state.step)
        return
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            held = engine.optimizer.state[parameter]
            yield from (held[key] for key in ("step", "exp_avg", "exp_avg_sq") if key in held)
