"""The balance of a checkpoint's leaves: what became of every value that its files hold."""

from __future__ import annotations

from typing import Any

from reshard import units
from reshard.commands.lines import row
from reshard.manifest import WEIGHT_KINDS, Manifest, TrainState
from reshard.state_dict.plain_values import is_description

_SHOWN = 3
_SECTIONS = ("scheduler", "scaler", "rng", "client", "trainer_state", "opaque")


def balance(manifest: Manifest) -> dict[str, Any]:
    """Return how many leaves became weights, optimizer state and train state, and which are opaque.

    Names of tied weights count as weights, step counters as optimizer state.
    """
    weights = sum(entry.kind in WEIGHT_KINDS for entry in manifest.entries.values())
    weights += len(manifest.tied)
    slots = len(manifest.entries) + len(manifest.tied) - weights
    counts = {
        "weights": weights,
        "optimizer": slots + len(manifest.train.optimizer_step),
        "train_state": _of_train_state(manifest.train),
    }
    read = sum(counts.values()) + len(manifest.unread)
    return {"read": read, **counts, "opaque": dict(manifest.unread)}


def line(held: dict[str, Any]) -> str:
    """Return the balance as a line of a report."""
    text = (
        f"{held['read']} read: {units.counted(held['weights'], 'weight')},"
        f" {held['optimizer']} optimizer,"
        f" {held['train_state']} train state"
    )
    opaque = held["opaque"]
    if opaque:
        text += f", {len(opaque)} opaque ({units.some(list(opaque), _SHOWN)})"
    return row("leaves", text)


def _of_train_state(train: TrainState) -> int:
    """The values beside tensors that a framework or a script saved."""
    counters = (train.step, train.samples, train.skipped_steps)
    sections = sum(_leaves(getattr(train, name)) for name in _SECTIONS)
    return sections + sum(counter is not None for counter in counters)


def _leaves(value: Any) -> int:
    if isinstance(value, dict) and not is_description(value):
        return sum(map(_leaves, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_leaves, value))
    return int(value is not None)
