"""Runs that nanotron wrote, in ``plugins/nanotron/tests/data``."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

KEPT = Path(__file__).parents[1] / "data"
CASES = ("fp32_tp2pp2", "zero_fp32_tp2dp3_groups", "zero_tp1pp2dp3", "zero_tp2pp2dp2")
SLOTS = ("exp_avg", "exp_avg_sq")


def list_files(run):
    """Return every file except random states, by its path in the run."""
    held = (path for path in sorted(run.rglob("*")) if path.is_file())
    return {str(p.relative_to(run)): p for p in held if p.parent.name != "random"}


def load_file(path):
    """Load a file of nanotron: plain values and tensors, without the order of their storages."""
    if path.suffix == ".pt":
        return torch.load(path)
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as held:
            return {"data": held.get_tensor("data"), "said": sorted(held.metadata().items())}
    return path.read_text()
