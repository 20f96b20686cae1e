"""Learning rates by the number of updates done, as DeepSpeed's schedulers give them.

Formulas: deepspeed/runtime/lr_schedules.py, 0.19.8. A scheduler there holds
``last_batch_iteration``, which is updates - 1; before the first update it gives the lowest rate.
"""

from __future__ import annotations

import math

from trainer.settings import Settings


def learning_rate(settings: Settings, updates: int) -> float:
    """Rate of the update that follows ``updates`` earlier ones (skipped steps do not count)."""
    iteration = updates - 1
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "WarmupCosineLR":
        return settings.lr * _cosine_ratio(settings, iteration)
    low = settings.warmup_min_lr
    if iteration < 0:
        return low
    return low + (settings.lr - low) * _linear_gamma(settings, iteration)


def ends_before(settings: Settings) -> bool:
    """Whether the last steps get the schedule's lowest rate only."""
    decays = settings.schedule in {"WarmupDecayLR", "WarmupCosineLR"}
    return decays and settings.schedule_steps < settings.steps


def _warmup(settings: Settings) -> int:
    return max(2, settings.warmup_steps)


def _rise(settings: Settings, iteration: int) -> float:
    """From 0 to 1 over the warmup."""
    if settings.warmup_type == "linear":
        return iteration / _warmup(settings)
    return 1.0 / math.log(_warmup(settings)) * math.log(iteration + 1)


def _linear_gamma(settings: Settings, iteration: int) -> float:
    if iteration < _warmup(settings):
        return _rise(settings, iteration)
    if settings.schedule == "WarmupLR":
        return 1.0
    left = float(settings.schedule_steps - iteration)
    return max(0.0, left / float(max(1.0, settings.schedule_steps - _warmup(settings))))


def _cosine_ratio(settings: Settings, iteration: int) -> float:
    if iteration < 0:
        return 0.0
    if iteration < _warmup(settings):
        low = settings.warmup_min_ratio
        return low + _rise(settings, iteration) * (1.0 - low)
    done = (iteration - _warmup(settings) + 1) / max(1, settings.schedule_steps - _warmup(settings))
    wave = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return max(0.0, settings.cos_min_ratio + (1.0 - settings.cos_min_ratio) * wave)
