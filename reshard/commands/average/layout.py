"""The mean of several checkpoints, planned by `split` as a model in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.commands.average.options import AverageOptions
from reshard.commands.average.report import AverageReport
from reshard.commands.merge import passes
from reshard.commands.merge.passes import Merge
from reshard.commands.output import Job
from reshard.commands.split.command import plan_split
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport
from reshard.core.manifest import Manifest, Origin, find_most_common_dtype, index_entries
from reshard.engine.output.temporary import temporary
from reshard.errors import ReshardError
from reshard.formats import registry
from reshard.system.paths import as_path

_SHOWN = "the mean"  # stands for the temporary directory in messages


@dataclass(kw_only=True, repr=False)
class SplitAverage(AverageReport, SplitReport):
    """The result of `average` that is written in a layout of `split`."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        yield from self.add_average(SplitReport.lines(self))


def plan_layout(
    merge: Merge, destination: Path, options: AverageOptions, report_as: str
) -> tuple[Job[SplitReport], list[str]]:
    """Plan the files of a layout of `split` that hold weights chosen as for `merge`.

    `split` finds what it needs besides the weights (the config of the model, its tokenizer) in a
    directory with the files that `merge` would write, which exists only while it plans.

    Args:
        report_as: the destination as the user wrote it.

    Returns:
        The job, and warnings for the report.
    """
    with temporary() as folder, _name_directory(folder):
        for name, data in passes.build_companions(merge).items():
            (as_path(folder) / name).write_bytes(data)
        manifest = _describe_model(merge, folder)
        job = plan_split(manifest, destination, _choose_optimizer(options), report_as=report_as)
    return job, [text.replace(folder, _SHOWN) for text in job.report.warnings]


def _choose_optimizer(options: AverageOptions) -> SplitOptions:
    chosen = options.for_split()
    is_decided = chosen.init_optimizer is not None or chosen.param_groups is not None
    if is_decided or not registry.find_writer(str(chosen.to)).weights_alone:
        return chosen
    return replace(chosen, init_optimizer="none")


def _describe_model(merge: Merge, folder: str) -> Manifest:
    """Return the mean as a model that was trained in the dtypes of the output."""
    weights = merge.weights
    dtypes = {entry.fqn: dtype for entry, dtype in weights.tensors}
    return Manifest(
        origin=Origin(
            format=registry.MODEL,
            weights_only=True,
            path=folder,
            mesh={"world": 1},
            precision=find_most_common_dtype(dtypes.values()),
        ),
        entries=index_entries(entry for entry, _ in weights.tensors),
        files=merge.manifest.files,
        tied=weights.dropped_aliases,
        trained_dtypes=dtypes,
        ordered=False,
        quantisation=merge.manifest.quantisation,
    )


@contextmanager
def _name_directory(folder: str) -> Iterator[None]:
    try:
        yield
    except ReshardError as error:
        error.where = error.where.replace(folder, _SHOWN)
        error.problem = error.problem.replace(folder, _SHOWN)
        raise
