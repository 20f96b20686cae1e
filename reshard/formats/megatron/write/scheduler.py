"""``opt_param_scheduler``: the state of Megatron's schedules of learning rate and weight decay.

Source: Megatron-LM core_v0.16.1 ``core/optimizer_param_scheduler.py`` (``state_dict``,
``load_state_dict``: every value but ``num_steps`` must be that of the command line, unless
``--override-opt-param-scheduler`` is given), ``training/checkpointing.py`` (it must be there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.training.state import WritableState


def make_scheduler(state: WritableState) -> tuple[dict[str, Any], list[str]]:
    """Return the source's scheduler if it is Megatron's, else a new one; and notes."""
    train = state.manifest.train
    stored = train.scheduler
    if isinstance(stored, Mapping) and "lr_decay_style" in stored:
        return dict(stored), []
    notes = [] if stored is None else ["not copied: the scheduler, because it is not Megatron's"]
    hypers = [group.hyper for group in state.groups]
    rate = max((hyper.get("lr", 0.0) for hyper in hypers), default=0.0)
    decay = max((hyper.get("weight_decay", 0.0) for hyper in hypers), default=0.0)
    steps = train.samples or 0
    scheduler = {
        "max_lr": rate,
        "lr_warmup_steps": 0,
        "num_steps": steps,
        "lr_decay_style": "constant",
        # OptimizerParamScheduler asserts that this is positive.
        "lr_decay_steps": max(steps, 1),
        "min_lr": 0.0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(steps, 1),
    }
    at = f"at {steps} samples" if steps else "at its start: the source counts no samples"
    notes.append(
        f"opt_param_scheduler created {at}; Megatron takes its schedule from the command line with"
        " --override-opt-param-scheduler"
    )
    return scheduler, notes
