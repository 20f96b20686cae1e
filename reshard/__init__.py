"""Reshard training checkpoints: merge, split and convert them, optimizer included.

    import reshard

    with reshard.open("run/") as checkpoint:          # any format, headers only
        checkpoint["model.norm.weight"][:16]           # reads 16 elements
        checkpoint.optimizer("exp_avg")["model.norm.weight"][...]
    reshard.merge("run/", "model/", dtype="bf16")

Importing it imports nothing that a command needs; opening a checkpoint and inspecting one import
neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard import errors as errors
from reshard.errors import ReshardError as ReshardError
from reshard.version import __version__ as __version__

if TYPE_CHECKING:  # the names below come with the first use of one: see `__getattr__`
    from pathlib import Path

    from reshard.commands.diff import DiffOptions as DiffOptions
    from reshard.commands.diff import DiffReport as DiffReport
    from reshard.commands.inspect import Inspection as Inspection
    from reshard.commands.inspect import inspect as inspect
    from reshard.commands.merge.options import MergeOptions as MergeOptions
    from reshard.commands.merge.report import MergeReport as MergeReport
    from reshard.commands.resume_check.options import ResumeCheckOptions as ResumeCheckOptions
    from reshard.commands.resume_check.report import ResumeReport as ResumeReport
    from reshard.commands.split.options import SplitOptions as SplitOptions
    from reshard.commands.split.report import SplitReport as SplitReport
    from reshard.commands.verify import VerifyOptions as VerifyOptions
    from reshard.commands.verify import VerifyReport as VerifyReport
    from reshard.formats import Paths
    from reshard.hooks import stamp as stamp
    from reshard.hooks import stamp_engine as stamp_engine
    from reshard.tensors import Checkpoint as Checkpoint
    from reshard.tensors import LazyTensor as LazyTensor

_HOMES = {
    "Checkpoint": "reshard.tensors",
    "DiffOptions": "reshard.commands.diff",
    "DiffReport": "reshard.commands.diff",
    "Inspection": "reshard.commands.inspect",
    "LazyTensor": "reshard.tensors",
    "MergeOptions": "reshard.commands.merge.options",
    "MergeReport": "reshard.commands.merge.report",
    "ResumeCheckOptions": "reshard.commands.resume_check.options",
    "ResumeReport": "reshard.commands.resume_check.report",
    "SplitOptions": "reshard.commands.split.options",
    "SplitReport": "reshard.commands.split.report",
    "VerifyOptions": "reshard.commands.verify",
    "VerifyReport": "reshard.commands.verify",
    "inspect": "reshard.commands.inspect",
    "stamp": "reshard.hooks",
    "stamp_engine": "reshard.hooks",
}
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
    "stamp",
    "stamp_engine",
    "verify",
]

if not TYPE_CHECKING:  # a checker that saw it would take any name

    def __getattr__(name: str) -> Any:
        """A name of `__all__` from its module, which is imported now."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open(  # noqa: A001 - reshard.open reads as it should
    path: Paths,
    *,
    tag: str | None = None,
    key: str | None = None,
    model: str | None = None,
    wrap: str | None = None,
    rules: Path | None = None,
) -> Checkpoint:
    """A mapping fqn -> lazy tensor over the checkpoint at ``path``; reads headers only.

    Args:
        path: a directory or file; several directories where each node kept its own files.
        tag: which checkpoint of a run directory.
        key: which state dict, where a checkpoint holds several.
        model: ``config.json``, a directory of one, or ``module:factory``, for flat parameters of
            which the files do not say what lies in them; ``wrap``: how FSDP 1 wrapped it.
        rules: a YAML file of how parameters of a model-parallel checkpoint are cut.

    Names are without wrapper prefixes (``module.``, ``_orig_mod.``), as `merge` writes them.

    Raises:
        ReshardError: the checkpoint is unknown, incomplete or corrupt.
    """
    from reshard import formats, keys
    from reshard.tensors import Checkpoint

    manifest = formats.read(path, tag=tag, key=key, model=model, wrap=wrap, rules=rules)
    return Checkpoint(keys.edit(manifest, keys.Edits()).manifest)


def merge(source: Paths, destination: str | Path, **options: Any) -> MergeReport:
    """Write the full weights; keywords as in `MergeOptions`.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    from reshard.commands.merge.command import merge as run
    from reshard.commands.merge.options import MergeOptions

    return run(source, destination, MergeOptions(**options))


def split(source: Paths, destination: str | Path, **options: Any) -> SplitReport:
    """Write the training state for other ranks or in another layout; as in `SplitOptions`.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    from reshard.commands.split.command import split as run
    from reshard.commands.split.options import SplitOptions

    return run(source, destination, SplitOptions(**options))


def diff(a: Paths, b: Paths, **options: Any) -> DiffReport:
    """Compare two training states of any layouts; keywords as in `DiffOptions`.

    Raises:
        ReshardError: one cannot be read; a difference is no error.
    """
    from reshard.commands.diff import DiffOptions
    from reshard.commands.diff import diff as run

    return run(a, b, DiffOptions(**options))


def verify(source: Paths, **options: Any) -> VerifyReport:
    """Check a checkpoint by named checks; keywords as in `VerifyOptions`.

    Raises:
        ReshardError: nothing can be said of it; a check that fails is in the report.
    """
    from reshard.commands.verify import VerifyOptions
    from reshard.commands.verify import verify as run

    return run(source, VerifyOptions(**options))


def resume_check(source: str | Path, **options: Any) -> ResumeReport:
    """Whether training goes on the same from what `split` writes.

    Keywords as in `ResumeCheckOptions`, and as in `SplitOptions` for the layout.

    Raises:
        ReshardError: nothing could be compared; a run that goes on otherwise is no error.
    """
    from reshard.commands.resume_check.command import resume_check as run
    from reshard.commands.resume_check.options import ResumeCheckOptions

    return run(source, ResumeCheckOptions.of(**options))
