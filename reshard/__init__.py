"""Reshard training checkpoints: merge, split and convert them, optimizer included.

    import reshard

    with reshard.open("run/") as checkpoint:          # any format, headers only
        checkpoint["model.norm.weight"][:16]           # reads 16 elements
        checkpoint.optimizer("exp_avg")["model.norm.weight"][...]
    reshard.merge("run/", "model/", dtype="bf16")

Importing it, opening a checkpoint and inspecting one import neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import fields as _fields
from pathlib import Path
from typing import Any

from reshard import errors as errors
from reshard import formats as _formats
from reshard import keys as _keys
from reshard.commands.diff import DiffOptions as DiffOptions
from reshard.commands.diff import DiffReport as DiffReport
from reshard.commands.diff import diff as _diff
from reshard.commands.inspect import Inspection as Inspection
from reshard.commands.inspect import inspect as inspect
from reshard.commands.merge.command import MergeOptions as MergeOptions
from reshard.commands.merge.command import merge as _merge
from reshard.commands.merge.report import MergeReport as MergeReport
from reshard.commands.resume_check.command import ResumeCheckOptions as ResumeCheckOptions
from reshard.commands.resume_check.command import resume_check as _resume_check
from reshard.commands.resume_check.report import ResumeReport as ResumeReport
from reshard.commands.split.command import split as _split
from reshard.commands.split.options import SplitOptions as SplitOptions
from reshard.commands.split.report import SplitReport as SplitReport
from reshard.commands.verify import VerifyOptions as VerifyOptions
from reshard.commands.verify import VerifyReport as VerifyReport
from reshard.commands.verify import verify as _verify
from reshard.errors import ReshardError as ReshardError
from reshard.tensors import Checkpoint as Checkpoint
from reshard.tensors import LazyTensor as LazyTensor
from reshard.version import __version__ as __version__

__all__ = [
    "Checkpoint",
    "DiffOptions",
    "DiffReport",
    "Inspection",
    "LazyTensor",
    "MergeOptions",
    "MergeReport",
    "ReshardError",
    "ResumeCheckOptions",
    "ResumeReport",
    "SplitOptions",
    "SplitReport",
    "VerifyOptions",
    "VerifyReport",
    "diff",
    "errors",
    "inspect",
    "merge",
    "open",
    "resume_check",
    "split",
    "verify",
]


def open(  # noqa: A001 - reshard.open reads as it should
    path: _formats.Paths,
    *,
    tag: str | None = None,
    key: str | None = None,
    model: str | None = None,
    wrap: str | None = None,
) -> Checkpoint:
    """A mapping fqn -> lazy tensor over the checkpoint at ``path``; reads headers only.

    Args:
        path: a directory or file; several directories where each node kept its own files.
        tag: which checkpoint of a run directory.
        key: which state dict, where a checkpoint holds several.
        model: ``config.json``, a directory of one, or ``module:factory``, for flat parameters of
            which the files do not say what lies in them; ``wrap``: how FSDP 1 wrapped it.

    Names are without wrapper prefixes (``module.``, ``_orig_mod.``), as `merge` writes them.

    Raises:
        ReshardError: the checkpoint is unknown, incomplete or corrupt.
    """
    manifest = _formats.read(path, tag=tag, key=key, model=model, wrap=wrap)
    return Checkpoint(_keys.edit(manifest, _keys.Edits()).manifest)


def merge(source: _formats.Paths, destination: str | Path, **options: Any) -> MergeReport:
    """Write the full weights; keywords as in `MergeOptions`.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    return _merge(source, destination, MergeOptions(**options))


def split(source: _formats.Paths, destination: str | Path, **options: Any) -> SplitReport:
    """Write the training state for other ranks or in another layout; as in `SplitOptions`.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    return _split(source, destination, SplitOptions(**options))


def diff(a: _formats.Paths, b: _formats.Paths, **options: Any) -> DiffReport:
    """Compare two training states of any layouts; keywords as in `DiffOptions`.

    Raises:
        ReshardError: one cannot be read; a difference is no error.
    """
    return _diff(a, b, DiffOptions(**options))


def verify(source: _formats.Paths, **options: Any) -> VerifyReport:
    """Check a checkpoint by named checks; keywords as in `VerifyOptions`.

    Raises:
        ReshardError: nothing can be said of it; a check that fails is in the report.
    """
    return _verify(source, VerifyOptions(**options))


def resume_check(source: str | Path, **options: Any) -> ResumeReport:
    """Whether training goes on the same from what `split` writes.

    Keywords as in `ResumeCheckOptions`, and as in `SplitOptions` for the layout.

    Raises:
        ReshardError: nothing could be compared; a run that goes on otherwise is no error.
    """
    own = {field.name for field in _fields(ResumeCheckOptions)} & options.keys()
    chosen = {name: options.pop(name) for name in own}
    return _resume_check(source, ResumeCheckOptions(layout=SplitOptions(**options), **chosen))
