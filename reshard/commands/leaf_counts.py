"""Counts of leaves (values that contain no others): what each was read as."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard import units
from reshard.core.manifest import WEIGHT_KINDS, Manifest

_SHOWN = 3
_SECTIONS = ("scheduler", "scaler", "rng", "client", "trainer_state", "opaque")


def count_leaves(manifest: Manifest) -> dict[str, Any]:
    """Return how many leaves became weights, optimizer state and train state.

    Names of tied weights count as weights, step counters as optimizer state. ``opaque`` lists the
    leaves that were not interpreted, each with its kind.
    """
    weights = sum(entry.kind in WEIGHT_KINDS for entry in manifest.entries.values())
    weights += len(manifest.tied)
    slots = len(manifest.entries) + len(manifest.tied) - weights
    counters = (manifest.train.step, manifest.train.samples, manifest.train.skipped_steps)
    sections = sum(_count(value) for name in _SECTIONS if (value := getattr(manifest.train, name)))
    counts = {
        "weights": weights,
        "optimizer": slots + len(manifest.train.optimizer_step),
        "train_state": sections + sum(counter is not None for counter in counters),
    }
    read = sum(counts.values()) + len(manifest.unread)
    return {"read": read, **counts, "opaque": dict(manifest.unread)}


def add_leaves(every: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of several checkpoints together."""
    total: dict[str, Any] = {"opaque": {}}
    for counts in every:
        for name, value in counts.items():
            total[name] = total.get(name, 0) + value if name != "opaque" else total[name] | value
    return total


def describe_leaves(counts: dict[str, Any]) -> str:
    """Return the counts of `count_leaves` as text for a report."""
    text = (
        f"{counts['read']} read: {units.counted(counts['weights'], 'weight')},"
        f" {counts['optimizer']} of the optimizer,"
        f" {counts['train_state']} of the train state"
    )
    opaque = counts["opaque"]
    if opaque:
        text += f", {len(opaque)} not interpreted ({units.abridge(list(opaque), _SHOWN)})"
    return text


def _count(value: Any) -> int:
    if isinstance(value, dict):
        # Imported here because most model files have no such value.
        from reshard.state_dict.plain_values import is_description

        return 1 if is_description(value) else sum(map(_count, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_count, value))
    return int(value is not None)
