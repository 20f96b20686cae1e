"""Read what the live objects of a framework held when they wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NAMES = ("expected.pt", "expected.pt")  # of the judges of DeepSpeed, and of all others


def read_expected(folder: Path) -> Any:
    """Return what the judge saved in the folder of a case, beside the checkpoint."""
    path = next(folder / name for name in NAMES if (folder / name).is_file())
    return torch.load(path, weights_only=False)
