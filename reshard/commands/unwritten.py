"""Outputs whose files are read without being written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.checks.identity import check_identity
from reshard.commands.output import Job, R
from reshard.commands.output_options import ValueOptions
from reshard.commands.reading import read_trusted
from reshard.core.manifest import Manifest
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.errors import UsageError
from reshard.model import ModelShapes
from reshard.system.files import SourceFiles


def plan_unwritten(
    source: formats.Paths,
    options: ValueOptions,
    plan: Callable[[Manifest, Path], Job[R]],
    live: ModelShapes | None = None,
) -> Job[R]:
    """Read a source, check that it can be trusted, and plan an output.

    Args:
        source: a path as for `reshard.open`.
        plan: plans the output, given the source and its path.
        live: the model of the program that reads the output, if it runs already.

    Raises:
        ReshardError: the source cannot be read, trusted or laid out.
    """
    if options.replicas == "mean":
        raise UsageError(
            "--replicas mean",
            "would store the means in a temporary file, which other programs cannot read",
            "pass --replicas first, or write a checkpoint with reshard split --replicas mean",
        )
    sources = formats.as_paths(source)
    manifest = read_trusted(sources, options, live)
    identity = check_identity(manifest, options.trust)
    job = plan(manifest, sources[0])
    job.report.identity = identity
    return job


@contextmanager
def open_planned(job: Job[Any], options: ValueOptions) -> Iterator[OnDemandFiles]:
    """Open the files of a planned output; their bytes are computed when they are read."""
    workers, _ = options.budget()
    with closing(SourceFiles(job.manifest.files)) as pool:  # each read checks what it has read
        yield OnDemandFiles(
            job.plan, job.manifest.files, pool, workers=workers, on_overflow=options.on_overflow
        )
