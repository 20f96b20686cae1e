"""How far Adam can move a weight, whatever the gradients are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf, sqrt
from typing import Any

from reshard.training import optimizers
from reshard.training.optimizers import AMSGRAD, MOMENTS


def is_bounded(hyper: Mapping[str, Any], slots: Collection[str]) -> bool:
    """Return whether a param group is one of Adam or AdamW, whose updates are bounded."""
    has_slots = set(MOMENTS) <= set(slots) <= {*MOMENTS, AMSGRAD}
    return has_slots and optimizers.is_adam(hyper)


def bound_update(hyper: Mapping[str, Any], largest: float, updates: float) -> float:
    """Return how far one update of Adam can move a weight, in units of the learning rate.

    Both moments are weighted means of the same gradients ``g``: ``m = sum(a * g)``, ``v = sum(b *
    g**2)``. By Cauchy-Schwarz, ``|m| / sqrt(v)`` is at most ``sqrt(sum(a**2 / b))``, which grows
    with the number of updates. Decoupled weight decay adds ``weight_decay * |weight|``.

    Args:
        largest: the largest magnitude of a weight.
        updates: the highest number of updates that the optimizer has made.
    """
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    ratio = beta1 * beta1 / beta2 if beta2 else inf
    if beta2 >= 1 or ratio >= 1:
        return inf  # the series diverges
    squared = (1 - beta1) ** 2 / ((1 - beta2) * (1 - ratio))
    if hyper.get("bias_correction", True):
        squared *= (1 - beta2**updates) * (1 - ratio**updates) / (1 - beta1**updates) ** 2
    return sqrt(max(squared, 1.0)) + abs(float(hyper.get("weight_decay") or 0)) * largest
