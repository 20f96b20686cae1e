"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from reshard import formats
from reshard.commands.output import Job, check_overlaps, convert, is_single_file
from reshard.commands.reading import Meter
from reshard.commands.split import passes, read_back
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport, describe_split
from reshard.commands.split.request import choose_writer, resolve_request
from reshard.core.manifest import WEIGHT_KINDS, Manifest, Skeleton
from reshard.engine.planning.planner import Plan
from reshard.errors import UsageError
from reshard.formats import engines, registry
from reshard.formats.base import Conversion, Notes, StateConversion, Writer
from reshard.formats.request import LiveTarget
from reshard.formats.values import dequantise, refuse_rounded_scales
from reshard.naming.options import Naming
from reshard.training import copied_files
from reshard.training.companion_files import add_derived_config, copy_companions
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

    def prepare(manifest: Manifest, output: Path, means: list[str]) -> Job[SplitReport]:
        return plan_split(manifest, output, options, report_as=str(destination), means=means)

    kinds = WEIGHT_KINDS if options.without_optimizer else None
    sources = formats.as_paths(source)
    return convert(
        sources, destination, options, prepare, kinds=kinds, is_stamped=True, meter=meter
    )


def plan_split(
    manifest: Manifest,
    destination: Path,
    options: SplitOptions,
    *,
    report_as: str = "",
    means: Sequence[str] = (),
    target: LiveTarget | None = None,
) -> Job[SplitReport]:
    """Run all passes, plan the files of the output and the copies that fill them.

    Args:
        report_as: the destination as the user wrote it.
        means: notes on copies that were averaged.
        target: the program that loads the output, if it runs already.
    """
    conversion, options = _open(manifest, options, report_as, means, target)
    # The order matters: copies are compared under the names of the source, which messages name,
    # the writer adapts a state that has the names of the output, and the batch is found in the
    # form that `adapt` gives the run's configuration.
    conversion = passes.keep_run(conversion)
    conversion = passes.compare_copies(conversion, options.replicas)
    conversion = passes.rename(conversion, options)
    conversion = passes.adapt(conversion)
    conversion = passes.rebalance_batch(conversion)
    conversion = passes.choose_random_states(conversion, options)
    if is_single_file(destination):
        request = replace(conversion.request, file=destination.name)
        conversion = replace(conversion, request=request)
    state = passes.build_state(conversion, options)
    return _plan(conversion, state, destination, options)


def _open(
    manifest: Manifest,
    options: SplitOptions,
    report_as: str,
    means: Sequence[str],
    target: LiveTarget | None,
) -> tuple[StateConversion, SplitOptions]:
    """Return the conversion with its writer and resolved options, and the options to use."""
    writer, source = choose_writer(manifest, options), registry.describe_source(manifest)
    manifest, decoded = dequantise(manifest)
    if options.dtype:
        refuse_rounded_scales(manifest, options.dtype)
    opened = Conversion(manifest=manifest, source=source, notes=Notes(derived=[*means, *decoded]))
    opened = passes.strip_wrappers(opened, writer, options)
    options = passes.choose_optimizer(opened, writer, options)
    given = target.shapes if target else None
    opened, shapes = passes.resolve_model(opened, writer, options, given)
    request = resolve_request(opened.manifest, shapes, writer, options)
    if target is not None:
        request = replace(
            request,
            engine_config=target.config,
            live_groups=target.groups,
            live_fsdp=target.fsdp,
            live_arguments=target.arguments,
            live_batch=target.batch,
        )
    _check_destination(report_as, writer)
    conversion = StateConversion(
        manifest=opened.manifest,
        source=source,
        notes=opened.notes,
        writer=writer,
        options=options,
        request=request,
        shapes=shapes,
    )
    return conversion, options


def _plan(
    conversion: StateConversion, state: WritableState, destination: Path, options: SplitOptions
) -> Job[SplitReport]:
    """Plan the files of the output, and the copies that fill them."""
    writer, request, manifest = conversion.writer, conversion.request, conversion.manifest
    layout = writer.lay_out(state, request)
    skeleton = layout.skeleton
    if not is_single_file(destination):
        beside, above = writer.find_companion_folders(skeleton, state, request)
        skeleton, notes = copy_companions(skeleton, state.manifest, beside=beside, above=above)
        conversion.notes.warnings += notes
        skeleton = _add_config(conversion, state, skeleton, beside)
        skeleton = writer.place(skeleton, state, destination.name)
    check_overlaps(skeleton)
    added = [
        *writer.list_own_entries(request),
        *copied_files.select_entries(manifest, skeleton),
        *layout.copied,
    ]
    if added:
        manifest = manifest.with_entries([*manifest.entries.values(), *added])
    filled = passes.leave_out_zeros(skeleton, state)
    plan = Plan(manifest.entries, filled, options.budget()[1])
    report = describe_split(conversion, state, skeleton, plan)
    report.load_line = layout.load_line or report.load_line
    report.notes = [*layout.notes, *([] if layout.copied else report.notes)]
    names = [file.name for file in skeleton.files]
    report.warnings += engines.describe_defects(
        engines.LoadedForm(
            writer.name,
            names,
            bool(state.groups),
            request.live_fsdp,
            source=manifest.origin if state.has_stored_slots else None,
            zero_stage=request.zero_stage if writer.writes_zero(request) else None,
            precision=str(request.dtype or manifest.origin.precision),
        )
    )
    checks = (skeleton, state, conversion.naming or Naming(manifest), options)

    def check(staging: Path) -> None:
        is_file = is_single_file(destination)
        read_back.check(staging / destination.name if is_file else staging, *checks)

    return Job(
        manifest=manifest,
        shown=manifest,
        skeleton=skeleton,
        plan=plan,
        report=report,
        check=check,
        save_id=state.save.save_id if state.save else "",
    )


def _add_config(
    conversion: StateConversion, state: WritableState, skeleton: Skeleton, at: str
) -> Skeleton:
    """Return the files with the model's config, if it was derived from the source."""
    naming = conversion.naming
    has_config = any(PurePosixPath(file.name).name == "config.json" for file in skeleton.files)
    if naming is None or naming.config is None or has_config:
        return skeleton
    dtype = conversion.request.dtype
    skeleton, note = add_derived_config(skeleton, naming.config, state, dtype, at)
    conversion.notes.derived.append(note)
    return skeleton


def _check_destination(destination: str, writer: Writer) -> None:
    """Refuse the name of a file for a layout that is a directory."""
    suffix = Path(destination).suffix
    if is_single_file(destination) and not (
        writer.writes_file and suffix in formats.PLAIN_SUFFIXES
    ):
        raise UsageError(
            destination,
            f"has the suffix {suffix} of a file, but --to {writer.name} writes "
            + ("a torch.save file" if writer.writes_file else "a directory"),
            "choose another name; --to torch writes one file if it ends in .pt, .pth or .bin",
        )
