"""A training state laid out for a program that already runs, without a copy on a disk.

The ranks of the program agree on one plan: rank 0 reads the headers of the source, runs the passes
of `split` and sends the result to the others. Each rank then reads the bytes of its own files only.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard import formats
from reshard.checks.identity import Trust
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.commands.output import Job
from reshard.commands.split.command import plan_split
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport
from reshard.commands.unwritten import plan_unwritten
from reshard.core.box import Index
from reshard.core.manifest import (
    MEMBER_LISTS,
    Entry,
    Key,
    Manifest,
    ParamGroup,
    Skeleton,
    SourceFile,
)
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.engine.move.options import OnOverflow
from reshard.engine.planning.planner import Plan
from reshard.errors import ReshardError, UsageError
from reshard.formats.request import NO_PROGRAM, LiveTarget
from reshard.live.names import get_live_name, use_live_names
from reshard.model import shapes_of
from reshard.system.files import SourceFiles
from reshard.system.threads import count_cores

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_logger = logging.getLogger("reshard")


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """The result of the planning rank: plain values, which can be sent to the other ranks.

    Args:
        entries, tied: the tensors of the source that the files have, under the live names.
        counters: ``step``, ``skipped_steps`` and ``samples`` of the source; None if not recorded.
    """

    entries: Mapping[Key, Entry]
    sources: Mapping[str, SourceFile]
    skeleton: Skeleton
    report: SplitReport
    counters: Mapping[str, int | None]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """The files that `split` would write, to be read by the ranks of a running program.

    Args:
        pool: the open files of the source.
        trust, on_overflow: the options of these names.
    """

    files: OnDemandFiles
    planned: PlannedFiles
    pool: SourceFiles
    trust: Trust
    on_overflow: OnOverflow


@contextmanager
def open_live_files(
    source: formats.Paths,
    options: SplitOptions,
    target: LiveTarget = NO_PROGRAM,
    *,
    workers: int | None = None,
) -> Iterator[LiveFiles]:
    """Open the files that `split` would write for these options; every rank must call it.

    Args:
        source: the checkpoint, of any format.
        options: those of `split`.
        workers: threads of one long read; by default the cores of the node, divided by its ranks.

    Raises:
        ReshardError: on every rank, if the source cannot be read, trusted or written so.
    """
    planned = compute_on_first_rank(lambda: _plan(source, options, target))
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    # Each read checks what it has read. The block may go on while the run saves again.
    with closing(SourceFiles(planned.sources)) as pool:
        plan = Plan(planned.entries, planned.skeleton)
        files = OnDemandFiles(
            plan,
            planned.sources,
            pool,
            workers=workers or count_cores(ranks),
            on_overflow=options.on_overflow,
            has_checksums=False,
        )
        yield LiveFiles(files, planned, pool, options.trust, options.on_overflow)


def read_options(given: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `split`: those that the program decides, and the user's.

    Raises:
        UsageError: an option is decided by the program, or unknown.
    """
    for name in given:
        if name in decided or name not in SplitOptions.__dataclass_fields__:
            is_decided = name in decided
            reason = (
                "is decided by the running program" if is_decided else "is not an option of split"
            )
            raise UsageError(name, reason, "leave it out")
    return {**decided, **given}


def describe_program(module: Any, groups: Sequence[Mapping[str, Any]]) -> LiveTarget:
    """Return what a program states about its model and its optimizer.

    The shapes name the members of the param groups, unless a parameter is not the model's.

    Args:
        module: if FSDP 1 has cut its parameters, the outermost one that FSDP 1 has wrapped.
        groups: the optimizer's param groups, as in ``optimizer.param_groups``: the parameters under
            ``params``, and hyperparameters.
    """
    names = {parameter: get_live_name(name) for name, parameter in module.named_parameters()}
    whole = {names[parameter]: shape for parameter, shape in _iterate_cut_by_fsdp1(module)}
    shapes = shapes_of(module).rename(get_live_name)
    shapes = replace(shapes, parameters={**shapes.parameters, **whole})
    if all(parameter in names for group in groups for parameter in group["params"]):
        shapes = replace(shapes, groups=tuple(_name_group(group, names) for group in groups))
    return LiveTarget(shapes=shapes, groups=_name_trained(groups, names))


def _iterate_cut_by_fsdp1(module: Any) -> Iterator[tuple[Any, Index]]:
    """Source: torch 2.13 ``torch/distributed/fsdp/_flat_param.py``, ``FlatParameter``."""
    for submodule in module.modules():
        flat = getattr(getattr(submodule, "_handle", None), "flat_param", None)
        if flat is not None:
            yield from zip(flat._params, map(tuple, flat._shapes), strict=True)  # noqa: SLF001 - no public names


def _name_group(group: Mapping[str, Any], names: Mapping[Any, str]) -> ParamGroup:
    hyper = {key: value for key, value in group.items() if key not in MEMBER_LISTS}
    return ParamGroup(hyper, tuple(names[parameter] for parameter in group["params"]))


def _name_trained(
    live: Sequence[Mapping[str, Any]], names: Mapping[Any, str]
) -> tuple[ParamGroup, ...]:
    """Return the live groups; none if a parameter in them has no name."""
    known = [
        [parameter for parameter in group["params"] if parameter.requires_grad] for group in live
    ]
    if not all(known) or not all(parameter in names for members in known for parameter in members):
        return ()
    return tuple(
        _name_group({**group, "params": members}, names)
        for group, members in zip(live, known, strict=True)
    )


def log_report(report: SplitReport) -> None:
    """Write a report to the log, on one rank."""
    if not is_first_rank():
        return
    _, *lines = report.lines()  # the first line states what was written: nothing
    for line in [f"loading {report.source} without a copy on a disk", *lines]:
        if not line.startswith("warning"):  # which follow
            _logger.info("%s", line)
    for warning in report.warnings:
        _logger.warning("%s", warning)


def log_warnings(manifest: Manifest) -> None:
    """Write the warnings of a checkpoint to the log, on one rank."""
    if is_first_rank():
        for warning in (*manifest.warnings, *find_counter_conflicts(manifest)):
            _logger.warning("%s", warning)


@contextmanager
def create_names(files: OnDemandFiles) -> Iterator[Path]:
    """Create a directory with the names of the files, for programs that look before they load.

    Files without tensors are there with their content, others only with their size (sparse).
    """
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        for name in files:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            data = b"" if files.has_tensors(name) else files.read(name, 0, files.nbytes(name))
            path.write_bytes(data)
            os.truncate(path, files.nbytes(name))
        yield Path(folder)


def _plan(source: formats.Paths, options: SplitOptions, live: LiveTarget) -> PlannedFiles:
    shapes = live.shapes

    def plan(manifest: Manifest, _: Path) -> Job[SplitReport]:
        prefix = None
        if shapes is not None:
            manifest, prefix = use_live_names(manifest, shapes.parameters, shapes.buffers)
        job = plan_split(manifest, Path("live"), options, live=live)
        job.report.notes += [str(prefix)] if prefix else []
        return job

    job = plan_unwritten(source, options, plan, shapes)
    entries, skeleton = job.manifest.entries, job.plan.target
    needed = {e.key: entries[e.key] for e in skeleton.entries if e.key in entries}
    train = job.manifest.train
    counters = {name: getattr(train, name) for name in ("step", "skipped_steps", "samples")}
    files, tied = dict(job.manifest.files), dict(job.manifest.tied)
    return PlannedFiles(needed, files, skeleton, job.report, counters, tied)


def compute_on_first_rank(compute: Callable[[], _T]) -> _T:
    """Return the result of rank 0 on every rank of the process group, if there is one.

    Raises:
        ReshardError: on every rank, what rank 0 raised.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compute()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except ReshardError as error:
            outcome[1] = error
        except Exception as error:
            # The other ranks wait for the broadcast of this one, so any failure is sent to them.
            outcome[1] = ReshardError("rank 0", f"failed with {type(error).__name__}: {error}")
            dist.broadcast_object_list(outcome, src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: _T = outcome[0]
    return result


def is_first_rank() -> bool:
    """Return whether this is rank 0, or the only process."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def raise_on_all_ranks(error: ReshardError | None) -> None:
    """Raise the first rank's error on every rank, so that none waits for another one.

    Raises:
        ReshardError: a rank passed an error.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        errors: list[ReshardError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        error = next((failure for failure in errors if failure is not None), None)
    if error is not None:
        raise error
