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

if TYPE_CHECKING:  # at run time, `__getattr__` imports these on first use
    from reshard.api import average as average
    from reshard.api import diff as diff
    from reshard.api import inspect as inspect
    from reshard.api import merge as merge
    from reshard.api import open as open  # noqa: A004 - reshard.open reads as it should
    from reshard.api import open_files as open_files
    from reshard.api import plan as plan
    from reshard.api import resume_check as resume_check
    from reshard.api import split as split
    from reshard.api import verify as verify
    from reshard.commands.average.options import AverageOptions as AverageOptions
    from reshard.commands.average.report import AverageReport as AverageReport
    from reshard.commands.diff import DiffOptions as DiffOptions
    from reshard.commands.diff import DiffReport as DiffReport
    from reshard.commands.inspect import Inspection as Inspection
    from reshard.commands.inspect import InspectOptions as InspectOptions
    from reshard.commands.merge.options import MergeOptions as MergeOptions
    from reshard.commands.merge.report import MergeReport as MergeReport
    from reshard.commands.open_files import FilesOptions as FilesOptions
    from reshard.commands.plan.options import PlanOptions as PlanOptions
    from reshard.commands.plan.report import PlanReport as PlanReport
    from reshard.commands.resume_check.options import ResumeCheckOptions as ResumeCheckOptions
    from reshard.commands.resume_check.report import ResumeReport as ResumeReport
    from reshard.commands.split.options import SplitOptions as SplitOptions
    from reshard.commands.split.report import SplitReport as SplitReport
    from reshard.commands.verify.files import check_file as check_file
    from reshard.commands.verify.options import VerifyOptions as VerifyOptions
    from reshard.commands.verify.report import VerifyReport as VerifyReport
    from reshard.core.keys import Edits as Edits
    from reshard.hooks import stamp as stamp
    from reshard.hooks import stamp_engine as stamp_engine
    from reshard.tensors.lazy import Checkpoint as Checkpoint
    from reshard.tensors.lazy import LazyTensor as LazyTensor

_HOMES = {  # of the public names that are not in `reshard.api`
    "AverageOptions": "reshard.commands.average.options",
    "AverageReport": "reshard.commands.average.report",
    "Checkpoint": "reshard.tensors.lazy",
    "DiffOptions": "reshard.commands.diff",
    "DiffReport": "reshard.commands.diff",
    "Edits": "reshard.core.keys",
    "FilesOptions": "reshard.commands.open_files",
    "InspectOptions": "reshard.commands.inspect",
    "Inspection": "reshard.commands.inspect",
    "LazyTensor": "reshard.tensors.lazy",
    "MergeOptions": "reshard.commands.merge.options",
    "MergeReport": "reshard.commands.merge.report",
    "PlanOptions": "reshard.commands.plan.options",
    "PlanReport": "reshard.commands.plan.report",
    "ResumeCheckOptions": "reshard.commands.resume_check.options",
    "ResumeReport": "reshard.commands.resume_check.report",
    "SplitOptions": "reshard.commands.split.options",
    "SplitReport": "reshard.commands.split.report",
    "VerifyOptions": "reshard.commands.verify.options",
    "VerifyReport": "reshard.commands.verify.report",
    "check_file": "reshard.commands.verify.files",
    "stamp": "reshard.hooks",
    "stamp_engine": "reshard.hooks",
}
__all__ = [
    "AverageOptions",
    "AverageReport",
    "Checkpoint",
    "DiffOptions",
    "DiffReport",
    "Edits",
    "FilesOptions",
    "InspectOptions",
    "Inspection",
    "LazyTensor",
    "MergeOptions",
    "MergeReport",
    "PlanOptions",
    "PlanReport",
    "ReshardError",
    "ResumeCheckOptions",
    "ResumeReport",
    "SplitOptions",
    "SplitReport",
    "VerifyOptions",
    "VerifyReport",
    "average",
    "check_file",
    "diff",
    "errors",
    "inspect",
    "merge",
    "open",
    "open_files",
    "plan",
    "resume_check",
    "split",
    "stamp",
    "stamp_engine",
    "verify",
]

if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> Any:
        """Import the module of a name in `__all__`, and return the object of that name."""
        if name not in __all__:
            hint = "; split(to=...) converts" if name == "convert" else ""  # as the command does
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_HOMES.get(name, "reshard.api")), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
