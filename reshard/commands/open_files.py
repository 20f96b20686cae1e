"""The files that `merge` or `split` would write, opened without being written.

`mount` and the file system of fsspec show them to other programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.commands.merge.options import MergeOptions
from reshard.commands.output import Job
from reshard.commands.output_options import ValueOptions
from reshard.commands.split.options import SplitOptions
from reshard.commands.unwritten import open_planned, plan_unwritten
from reshard.core.manifest import Manifest
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.errors import UsageError
from reshard.formats import registry
from reshard.options import option
from reshard.system.paths import as_path

_OF_THIS_COMMAND: dict[str, Any] = {"html": None, "overwrite": False}  # no files are written


@dataclass(frozen=True, kw_only=True)
class FilesOptions(ValueOptions):
    """The options that determine files which are read without being written."""

    to: str = option(
        registry.MODEL,
        f"Layout of the files: {registry.MODEL}, as merge writes it, or a layout of split.",
        group="Target",
        choices=(registry.MODEL, *registry.list_built_in_writers()),
    )
    world_size: int | None = option(
        None, "Number of ranks of a layout of split.", group="Target", minimum=1, unset="as saved"
    )
    dtype: str | None = option(
        None, "Dtype of the weights: bf16, fp16 or fp32.", group="Target", unset="as merge or split"
    )


@contextmanager
def open_files(source: formats.Paths, options: FilesOptions) -> Iterator[OnDemandFiles]:
    """Open the files that `merge` or `split` would write; nothing is written.

    Args:
        source: a path as for `reshard.open`.

    Raises:
        ReshardError: the source cannot be read, trusted or laid out.
    """
    job = plan_unwritten(source, options, partial(_plan, options=options))
    with open_planned(job, options) as files:
        yield files


def _plan(manifest: Manifest, source: Path, options: FilesOptions) -> Job[Any]:
    if options.to == registry.MODEL:
        from reshard.commands.merge.command import plan_merge

        if options.world_size is not None:
            raise UsageError("--world-size", "has no effect on a model's files", "leave it out")
        chosen = options.convert_to(MergeOptions, **_OF_THIS_COMMAND)
        return plan_merge(manifest, source, as_path("unwritten"), chosen)
    from reshard.commands.split.command import plan_split

    split = options.convert_to(SplitOptions, **_OF_THIS_COMMAND)
    return plan_split(manifest, as_path("unwritten"), split)
