"""Learning rates by the number of updates, as DeepSpeed's schedulers compute them.

Formulas: deepspeed/runtime/lr_schedules.py, 0.19.8. They count iterations, which are updates - 1;
the first update, iteration -1, has the lowest rate.
"""

from __future__ import annotations

import math

from trainer.core.settings import CoreSettings


def compute_learning_rate(settings: CoreSettings, updates: int) -> float:
    """Return the rate of the update after ``updates`` earlier ones (skipped steps do not count)."""
    iteration = updates - 1
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "WarmupCosineLR":
        return settings.lr * _cosine_ratio(settings, iteration)
    lowest = settings.warmup_min_lr
    if iteration < 0:
        return lowest
    return lowest + (settings.lr - lowest) * _warmup_decay_ratio(settings, iteration)


def _warmup_steps(settings: CoreSettings) -> int:
    return max(2, settings.warmup_steps)  # as in DeepSpeed; `log` of 1 step would be 0


def _warmup_ratio(settings: CoreSettings, iteration: int) -> float:
    if settings.warmup_type == "linear":
        return iteration / _warmup_steps(settings)
    return 1.0 / math.log(_warmup_steps(settings)) * math.log(iteration + 1)


def _warmup_decay_ratio(settings: CoreSettings, iteration: int) -> float:
    if iteration < _warmup_steps(settings):
        return _warmup_ratio(settings, iteration)
    if settings.schedule == "WarmupLR":
        return 1.0
    remaining = float(settings.schedule_steps - iteration)
    return max(0.0, remaining / float(max(1.0, settings.schedule_steps - _warmup_steps(settings))))


def _cosine_ratio(settings: CoreSettings, iteration: int) -> float:
    if iteration < 0:
        return 0.0
    if iteration < _warmup_steps(settings):
        first = settings.warmup_min_ratio
        return first + _warmup_ratio(settings, iteration) * (1.0 - first)
    done = (iteration - _warmup_steps(settings) + 1) / max(
        1, settings.schedule_steps - _warmup_steps(settings)
    )
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return max(0.0, settings.cos_min_ratio + (1.0 - settings.cos_min_ratio) * cosine)
