"""``average``: write the weighted mean of the weights of several checkpoints of any layouts.

Each checkpoint passes through the passes of `merge` up to the choice of its weights, so that all
have the names and dtypes of the output. Their means are tensors that are computed when they are
read, and the rest is a merge, or with ``--to`` a split of a model that has these tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.checks.identity import check_identity
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.commands.average.options import AverageOptions
from reshard.commands.average.report import AverageReport, MergedAverage
from reshard.commands.leaf_counts import add_leaves, count_leaves
from reshard.commands.merge import command as merging
from reshard.commands.merge import passes
from reshard.commands.merge.options import MergeOptions
from reshard.commands.merge.passes import Merge
from reshard.commands.merge.report import describe_merge
from reshard.commands.output import Job, convert
from reshard.commands.output_report import OutputReport
from reshard.commands.passes import run_passes
from reshard.commands.reading import Meter, read_trusted
from reshard.core.location import Location
from reshard.core.manifest import WEIGHT_KINDS, Manifest
from reshard.engine.planning.planner import Plan
from reshard.errors import DifferentError, IncompleteError, UsageError
from reshard.formats import refused_paths, run_directory
from reshard.layouts.model_parallel import config_keys
from reshard.model import library
from reshard.naming.config import read_config
from reshard.system.files import SourceFiles
from reshard.tensors.averages import matching
from reshard.tensors.averages.coefficients import SourceStep, compute_ema, find_order, parse_weights
from reshard.tensors.averages.mean import count_worker_nbytes
from reshard.tensors.weights import Weights
from reshard.training.companion_files import Companions
from reshard.units import abridge, counted

_FEWEST = 2  # checkpoints that have an average


@dataclass(frozen=True, slots=True)
class _WeightedCheckpoint:
    path: Path
    manifest: Manifest
    weight: Fraction | None


def average(
    sources: formats.Paths,
    destination: str | Path,
    options: AverageOptions | None = None,
    meter: Meter | None = None,
) -> AverageReport:
    """Write the weighted mean of the weights of several checkpoints.

    Args:
        sources: the checkpoints; with ``last``, the directory of one run.
        destination: as in `merge`.
        meter: opens a progress display for a number of bytes.

    Raises:
        ReshardError: see its subclasses; the destination is then unchanged.
    """
    options = options or AverageOptions()
    paths = list_sources(formats.as_paths(sources), options)

    def prepare(manifest: Manifest, output: Path, _means: list[str]) -> Job[AverageReport]:
        others = [read_trusted([path], options) for path in paths[1:]]
        identities = [check_identity(other, options.trust) for other in others]
        members = _weigh(paths, [manifest, *others], options)
        if options.to is None:
            job = _plan(members, output, options)
        else:
            job = _plan_layout(members, output, options, str(destination))
        job.report.other_identities = identities
        return job

    return convert(
        paths[:1],
        destination,
        options,
        prepare,
        kinds=WEIGHT_KINDS,
        beside=paths[1:],
        meter=meter,
    )


def list_sources(paths: Sequence[Path], options: AverageOptions) -> list[Path]:
    """Return the paths of the checkpoints to average.

    Raises:
        UsageError: there are fewer than two, or the run has fewer than ``--last`` asks for.
        IncompleteError: one of the newest checkpoints of the run is not complete.
    """
    if options.last is None:
        if len(paths) < _FEWEST:
            raise UsageError(
                ", ".join(map(str, paths)) or "SOURCE",
                "is one checkpoint, but an average needs at least two",
                "name several checkpoints, or pass --last N to average the newest of a run",
            )
        return list(paths)
    if len(paths) != 1:
        raise UsageError(
            f"--last {options.last}",
            f"takes the checkpoints of one run, but {len(paths)} paths were given",
            "pass the directory of one run",
        )
    return _list_newest(paths[0], options.last)


def _list_newest(path: Path, count: int) -> list[Path]:
    found = run_directory.list_checkpoints(
        refused_paths.find_run(Location.from_paths([path])), refused_paths.is_checkpoint
    )
    if len(found) < count:
        remedy = "list the checkpoints to average, or pass the directory of a run that has several"
        if len(found) >= _FEWEST:
            remedy = f"pass --last {len(found)}, or list the checkpoints to average"
        raise UsageError(
            f"--last {count}", f"{path} has {counted(len(found), 'numbered checkpoint')}", remedy
        )
    newest = list(found.items())[-count:]
    for number, place in newest:
        if place is None:
            raise IncompleteError(
                path,
                f"there is no complete checkpoint of step {number}; its save may have been"
                " interrupted",
                "list the checkpoints to average, without this one",
            )
    return [place.path for _, place in newest if place is not None]


def _weigh(
    paths: Sequence[Path], manifests: Sequence[Manifest], options: AverageOptions
) -> list[_WeightedCheckpoint]:
    steps = [SourceStep(m.origin.path, m.train.step) for m in manifests]
    _refuse_repeated(paths, manifests)
    if options.last is not None:
        _check_steps(steps)
    weights: list[Fraction] | None = None
    if options.ema is not None:
        weights = compute_ema(options.ema, steps)
    elif options.weights is not None:
        weights = parse_weights(options.weights, len(steps))
    given: Sequence[Fraction | None] = weights or [None] * len(steps)
    members = [_WeightedCheckpoint(*member) for member in zip(paths, manifests, given, strict=True)]
    return [members[number] for number in find_order(steps)]


def _refuse_repeated(paths: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    seen: dict[frozenset[str], Path] = {}
    for path, manifest in zip(paths, manifests, strict=True):
        files = frozenset(str(formats.as_paths(file)[0].resolve()) for file in manifest.files)
        if files in seen:
            raise UsageError(
                path,
                f"is the same checkpoint as {seen[files]}",
                "list it once, and increase its factor with --weights",
            )
        seen[files] = path


def _check_steps(steps: Sequence[SourceStep]) -> None:
    known = [source for source in steps if source.step is not None]
    for before, after in pairwise(known):
        if (before.step or 0) >= (after.step or 0):
            raise DifferentError(
                after.path,
                f"states step {after.step}, but {before.path} states step {before.step}: the"
                " numbers of the directories and the steps in the files contradict each other",
                "list the checkpoints to average",
            )


def _plan(
    members: Sequence[_WeightedCheckpoint], output: Path, options: AverageOptions
) -> Job[AverageReport]:
    means = _average(members, output, options)
    merge = passes.lay_out(means.merge)

    def describe(manifest: Manifest, merge: Merge, plan: Plan) -> AverageReport:
        facts = {**_fields_of(describe_merge(manifest, merge, plan)), **means.describe(members)}
        return MergedAverage(**facts | {"warnings": merge.notes.warnings})

    return merging.plan_files(merge, members[-1].manifest, describe)


def _plan_layout(
    members: Sequence[_WeightedCheckpoint], output: Path, options: AverageOptions, report_as: str
) -> Job[AverageReport]:
    """Plan the files of the means as those of a model of its own, which `split` lays out."""
    # `split` with its formats takes a fifth of the time of all imports, and the usual average does
    # without it.
    from reshard.commands.average import layout

    # All weights need the names that a model's directory has: `split` renames them.
    means = _average(members, output.with_suffix(""), options)
    job, warnings = layout.plan_layout(means.merge, output, options, report_as)
    facts = {**_fields_of(job.report), **means.describe(members)}
    facts["format"] = f"mean of {counted(len(members), 'checkpoint')}"
    facts["warnings"] = [*means.merge.notes.warnings, *warnings]
    facts["derived"] = [*means.merge.notes.derived, *job.report.derived]
    if facts["optimizer_tensors_left"]:
        text = f"{facts['optimizer_tensors_left']} optimizer tensors (average writes weights)"
        facts["dropped"] = [*job.report.dropped, text]
    return Job(
        manifest=replace(job.manifest, origin=members[-1].manifest.origin),
        shown=members[-1].manifest,
        skeleton=job.skeleton,
        plan=job.plan,
        report=layout.SplitAverage(**facts),
        check=job.check,
        stores_masters=job.stores_masters,
        worker_nbytes=means.merge.computed_nbytes,
    )


def _fields_of(report: OutputReport) -> dict[str, Any]:
    return {field.name: getattr(report, field.name) for field in fields(report)}


@dataclass(frozen=True, slots=True)
class _Means:
    """``merge`` is that of the last checkpoint, with the means as its weights."""

    merge: Merge
    averaged: matching.Averaged
    merges: Sequence[Merge]

    def describe(self, members: Sequence[_WeightedCheckpoint]) -> dict[str, Any]:
        """Return the fields of a report that do not depend on the layout of the output."""
        is_equal = members[0].weight is None
        what = (
            f"values in float64, divided by {len(members)}"
            if is_equal
            else "weight x value in float64"
        )
        read = sum(entry.nbytes for merge in self.merges for entry, _ in merge.weights.tensors)
        left = sum(
            kind not in WEIGHT_KINDS for member in members for kind, _ in member.manifest.entries
        )
        return {
            "source": ", ".join(str(member.path) for member in members),
            "format": members[-1].manifest.origin.description,
            "bytes_read": read,
            "optimizer_tensors_left": left,
            "sources": [_describe_member(member, len(members)) for member in members],
            "means": self.averaged.means,
            "equal": self.averaged.equal,
            "arithmetic": f"sum of {what}; rounded to float32, then to the dtype that is written",
            "leaves": add_leaves(count_leaves(member.manifest) for member in members),
        }


def _average(
    members: Sequence[_WeightedCheckpoint], output: Path, options: AverageOptions
) -> _Means:
    merges = list(_choose_weights(members, output, options))
    sources = [
        matching.Summand(
            str(member.path), merge.weights, None if member.weight is None else float(member.weight)
        )
        for member, merge in zip(members, merges, strict=True)
    ]
    with SourceFiles() as pool:
        averaged = matching.average(sources, pool)
    last = merges[-1]
    files = {path: file for merge in merges for path, file in merge.manifest.files.items()}
    result = replace(
        last,
        manifest=replace(last.manifest, files=files),
        weights=_count_weights(last.weights, [merge.weights for merge in merges], averaged),
        worker_nbytes=last.worker_nbytes + count_worker_nbytes(len(members)),
    )
    result.notes.warnings[:] = [*_join_warnings(members, merges), *averaged.notes]
    return _Means(result, averaged, merges)


def _join_warnings(
    members: Sequence[_WeightedCheckpoint], merges: Sequence[Merge]
) -> Iterator[str]:
    """Yield the warnings of all checkpoints; one that not all have names its checkpoints."""
    paths: dict[str, list[str]] = defaultdict(list)
    for member, merge in zip(members, merges, strict=True):
        manifest = member.manifest
        own = (*manifest.warnings, *find_counter_conflicts(manifest), *merge.notes.warnings)
        for text in dict.fromkeys(own):
            paths[text].append(str(member.path))
    for text, found in paths.items():
        yield text if len(found) == len(members) else f"{abridge(found)}: {text}"


def _choose_weights(
    members: Sequence[_WeightedCheckpoint], output: Path, options: AverageOptions
) -> Iterator[Merge]:
    # A checkpoint without a config.json takes that of the last one that has it, so that all have
    # the same names.
    chosen = options.convert_to(MergeOptions)
    opened = [
        run_passes(
            merging.OPENING, merging.open_merge(member.manifest, member.path, output, chosen)
        )
        for member in members
    ]
    known = [merge.companions for merge in opened if merge.companions.config is not None]
    _check_configs(known)
    for merge in opened:
        lacks_config = merge.companions.config is None
        completed = replace(merge, companions=known[-1]) if known and lacks_config else merge
        yield run_passes(merging.CHOOSING, completed)


def _check_configs(known: Sequence[Companions]) -> None:
    # Equal shapes are not enough: the number of heads or the base of rotary positions changes what
    # the same weights compute.
    for first, other in pairwise(known):
        if first.config == other.config or first.directory is None or other.directory is None:
            continue
        files = first.directory / "config.json", other.directory / "config.json"
        # With the defaults of the model's class, a key that only one of them states is compared.
        difference = config_keys.find_first_difference(*map(_complete_config, (first, other)))
        if difference:
            raise DifferentError(
                files[1],
                f"describes another model than {files[0]}: {difference}",
                "average checkpoints of one model; if the difference does not matter, choose the"
                " config of the output with --hf-dir DIR",
            )


def _complete_config(companions: Companions) -> Mapping[str, Any]:
    stated: Mapping[str, Any] = companions.config or {}
    if companions.directory is None or not library.is_installed() or "model_type" not in stated:
        return stated
    try:
        return read_config(companions.directory / "config.json")
    except UsageError:  # a model of its own code
        return stated


def _count_weights(last: Weights, every: Sequence[Weights], averaged: matching.Averaged) -> Weights:
    return replace(
        last,
        tensors=averaged.tensors,
        from_master=sum(weights.from_master for weights in every),
        from_copy=sum(weights.from_copy for weights in every),
        buffers=sum(weights.buffers for weights in every),
        dropped_aliases=averaged.dropped_aliases,
    )


def _describe_member(member: _WeightedCheckpoint, count: int) -> dict[str, object]:
    return {
        "path": str(member.path),
        "format": member.manifest.origin.description,
        "step": member.manifest.train.step,
        "weight": 1 / count if member.weight is None else float(member.weight),
        "given": "" if member.weight is None else str(member.weight),
    }
