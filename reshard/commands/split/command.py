"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard import formats, replicas
from reshard.commands.output import (
    build_page,
    check_overlaps,
    is_single_file,
    open_source,
    report_untouched,
    resolve_destination,
    write,
)
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter
from reshard.commands.split import passes, read_back
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport, describe_split
from reshard.commands.split.request import choose_writer, resolve_request
from reshard.errors import UsageError
from reshard.formats import engines, registry
from reshard.formats.base import Conversion, Notes, Writer
from reshard.identity import check_identity
from reshard.manifest import WEIGHT_KINDS, Manifest, Skeleton
from reshard.naming.options import Naming
from reshard.plan.planner import Plan
from reshard.training import copied_files
from reshard.training.companion_files import with_companions
from reshard.training.state import WritableState


def split(
    source: formats.Paths,
    destination: str | Path,
    options: SplitOptions | None = None,
    meter: Meter | None = None,
) -> SplitReport:
    """Write the training state of ``source`` for another number of ranks, or in another layout.

    Raises:
        ReshardError: see its subclasses; the destination is then unchanged.
    """
    options = options or SplitOptions()
    began = time.perf_counter()
    sources, output = formats.as_paths(source), resolve_destination(destination)
    check_page(options, sources, output)
    with report_untouched(output):
        manifest = open_source(sources, output, options, is_directory=not is_single_file(output))
        identity = check_identity(manifest, options.trust)
        kinds = WEIGHT_KINDS if options.without_optimizer else None
        with replicas.average_replicas(manifest, options.replicas, kinds) as (averaged, means):
            job = _prepare(averaged, output, options, str(destination), means)
            report = job.report
            report.destination, report.identity = str(destination), identity
            report.options = options.given()
            if not options.dry_run:
                _write(job, output, options, meter)
                report.seconds = time.perf_counter() - began
            write_page(
                options,
                lambda: build_page(report.to_json(), job.manifest, job.skeleton),
                written=report.destination if report.done else "",
            )
            return report


@dataclass(frozen=True, slots=True)
class _Job:
    """A planned split, of which nothing is written yet.

    Args:
        manifest: the source, with the parts that are created for the output.
    """

    manifest: Manifest
    state: WritableState
    naming: Naming
    skeleton: Skeleton
    plan: Plan
    report: SplitReport


def _prepare(
    manifest: Manifest,
    destination: Path,
    options: SplitOptions,
    report_as: str,
    means: Sequence[str],
) -> _Job:
    """Run all passes, plan the files of the output and the copies that fill them.

    Args:
        report_as: the destination as the user wrote it.
        means: notes on copies that were averaged.
    """
    conversion, options = _open(manifest, options, report_as, means)
    # The order matters: copies are compared under the names of the source, which messages name,
    # and the writer adapts a state that has the names of the output.
    conversion = passes.keep_run(conversion)
    conversion = passes.rebalance_batch(conversion)
    conversion = passes.compare_copies(conversion, options.replicas)
    conversion = passes.rename(conversion, options)
    conversion = passes.adapt(conversion)
    conversion = passes.choose_random_states(conversion, checks=options.trust != "none")
    if is_single_file(destination):
        request = replace(conversion.request, file=destination.name)
        conversion = replace(conversion, request=request)
    state = passes.build_state(conversion, options)
    return _plan(conversion, state, destination, options)


def _open(
    manifest: Manifest, options: SplitOptions, report_as: str, means: Sequence[str]
) -> tuple[Conversion, SplitOptions]:
    """Return the conversion with its writer and resolved options, and the options to use."""
    writer, source = choose_writer(manifest, options), registry.describe_source(manifest)
    manifest, stripped = passes.strip_wrappers(manifest, writer, options)
    options, weights_alone = passes.choose_optimizer(manifest, writer, options)
    manifest, shapes = passes.resolve_model(manifest, source, writer, options)
    request = resolve_request(manifest, shapes, writer, options)
    _check_destination(report_as, writer)
    conversion = Conversion(
        manifest=manifest,
        source=source,
        writer=writer,
        options=options,
        request=request,
        shapes=shapes,
        notes=Notes(derived=[*means, *stripped], warnings=weights_alone),
    )
    return conversion, options


def _plan(
    conversion: Conversion, state: WritableState, destination: Path, options: SplitOptions
) -> _Job:
    """Plan the files of the output, and the copies that fill them."""
    writer, request, manifest = conversion.writer, conversion.request, conversion.manifest
    layout = writer.lay_out(state, request)
    skeleton = layout.skeleton
    if not is_single_file(destination):
        beside, above = writer.find_companion_folders(skeleton, state, request)
        skeleton = with_companions(skeleton, state.manifest, beside=beside, above=above)
        skeleton = writer.place(skeleton, state, destination.name)
    check_overlaps(skeleton)
    added = [*writer.list_own_entries(request), *copied_files.select_entries(manifest, skeleton)]
    if added:
        manifest = manifest.with_entries([*manifest.entries.values(), *added])
    filled = passes.without_zeros(skeleton, state)
    plan = Plan(manifest.entries, filled, options.budget()[1])
    report = describe_split(conversion, state, skeleton, plan)
    report.notes = [*layout.notes, *report.notes]
    names = [file.name for file in skeleton.files]
    report.warnings += engines.describe_defects(
        engines.Form(writer.name, names, bool(state.groups))
    )
    naming = conversion.naming or Naming(manifest)
    return _Job(manifest, state, naming, skeleton, plan, report)


def _write(job: _Job, destination: Path, options: SplitOptions, meter: Meter | None) -> None:
    """Write the output, and add the outcome to the report."""
    output = write(
        job.plan,
        job.manifest,
        destination,
        options,
        is_directory=not is_single_file(destination),
        check=lambda staging: read_back.check(
            staging / destination.name if is_single_file(destination) else staging,
            *(job.skeleton, job.state, job.naming, options),
        ),
        meter=meter,
    )
    report = job.report
    report.overflowed = dict(output.outcome.overflowed)
    report.resumed_bytes = output.resumed_bytes
    report.warnings += output.notes
    report.verified = options.verify
    report.done = True


def _check_destination(destination: str, writer: Writer) -> None:
    """Refuse the name of a file for a layout that is a directory.

    Raises:
        UsageError: the destination has the suffix of a file, and the layout is a directory.
    """
    suffix = Path(destination).suffix
    if is_single_file(destination) and not (
        writer.writes_file and suffix in formats.PLAIN_SUFFIXES
    ):
        raise UsageError(
            destination,
            f"ends in {suffix} as one file does, and --to {writer.name} writes "
            + ("a file of torch.save" if writer.writes_file else "a directory"),
            "choose another name; --to torch writes one file if it ends in .pt, .pth or .bin",
        )
