"""Reshard training checkpoints: merge, split and convert them, optimizer included.

    import reshard

    with reshard.open("run/") as checkpoint:          # any format, headers only
        checkpoint["model.norm.weight"][:16]           # reads 16 elements
        checkpoint.optimizer("exp_avg")["model.norm.weight"][...]
    reshard.merge("run/", "model/", dtype="bf16")

Importing it, opening a checkpoint and inspecting one import neither torch nor numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard import errors as errors
from reshard import formats as _formats
from reshard.commands.inspect import Inspection as Inspection
from reshard.commands.inspect import inspect as inspect
from reshard.commands.merge import MergeOptions as MergeOptions
from reshard.commands.merge import merge as _merge
from reshard.commands.merge_report import MergeReport as MergeReport
from reshard.errors import ReshardError as ReshardError
from reshard.tensors import Checkpoint as Checkpoint
from reshard.tensors import LazyTensor as LazyTensor
from reshard.version import __version__ as __version__

__all__ = [
    "Checkpoint",
    "Inspection",
    "LazyTensor",
    "MergeOptions",
    "MergeReport",
    "ReshardError",
    "errors",
    "inspect",
    "merge",
    "open",
]


def open(  # noqa: A001 - reshard.open reads as it should
    path: str | Path, *, tag: str | None = None, key: str | None = None
) -> Checkpoint:
    """A mapping fqn -> lazy tensor over the checkpoint at ``path``; reads headers only.

    Raises:
        ReshardError: the checkpoint is unknown, incomplete or corrupt.
    """
    return Checkpoint(_formats.read(path, tag=tag, key=key))


def merge(source: str | Path, destination: str | Path, **options: Any) -> MergeReport:
    """Write the full weights; keywords as in `MergeOptions`.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    return _merge(source, destination, MergeOptions(**options))
