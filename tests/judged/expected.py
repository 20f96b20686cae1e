"""Read what the live objects of a framework held when they wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.judges.server import EXPECTED


def read_expected(folder: Path) -> Any:
    """Return what the judge saved in the folder of a case, beside the checkpoint."""
    return torch.load(folder / EXPECTED, weights_only=False)
