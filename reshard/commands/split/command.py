"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from reshard import formats, keys, replicas, weights
from reshard.commands import naming
from reshard.commands.naming import Naming
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
from reshard.commands.split import for_megatron, own_states, read_back, run_of_trainer
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport, describe
from reshard.commands.split.request import requested, without_optimizer
from reshard.commands.split.state import (
    is_weights,
    made_state,
    model_config,
    ordered,
    save_of,
    stored,
    told,
)
from reshard.containers import skeletons
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.files import SourceFiles
from reshard.formats import engines, placeholders
from reshard.formats.targets import Target
from reshard.formats.targets.request import Request
from reshard.identity import Identity, check_identity
from reshard.manifest import WEIGHT_KINDS, Manifest, Skeleton
from reshard.plan.planner import Plan
from reshard.training import copied_files
from reshard.training.batch import Rebalanced, rebalanced
from reshard.training.companion_files import with_companions
from reshard.training.state import Training


def split(
    source: formats.Paths,
    destination: str | Path,
    options: SplitOptions | None = None,
    meter: Meter | None = None,
) -> SplitReport:
    """Write the training state of ``source`` for another number of ranks, or in another layout.

    Raises:
        ReshardError: see its subclasses; nothing is left at the destination then.
    """
    options = options or SplitOptions()
    began = time.perf_counter()
    sources, place = formats.as_paths(source), resolve_destination(destination)
    check_page(options, sources, place)
    with report_untouched(place):
        manifest = open_source(sources, place, options, is_directory=not is_single_file(place))
        identity = check_identity(manifest, options.trust)
        kinds = WEIGHT_KINDS if options.without_optimizer else None
        with replicas.average_replicas(manifest, options.replicas, kinds) as (averaged, means):
            begun = _Begun(averaged, str(destination), began, means, identity)
            return _split(begun, place, options, meter)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A split whose source is open.

    Args:
        report_as: the destination as the user wrote it.
        began: when, as `time.perf_counter` has it.
        means: what to say of copies that were averaged.
        identity: what showed that the files of the source belong together.
    """

    manifest: Manifest
    report_as: str
    began: float
    means: Sequence[str]
    identity: Identity


def _keeps_names(begun: _Begun, options: SplitOptions) -> bool:
    """Whether the run to come calls its parameters as this one: it is the same code."""
    is_deepspeed = begun.manifest.origin.format.startswith("deepspeed")
    return is_deepspeed and options.to in (None, "deepspeed", "ds-universal") and not options.model


def _split(
    begun: _Begun, destination: Path, options: SplitOptions, meter: Meter | None
) -> SplitReport:
    job = _prepare(begun, destination, options)
    report = job.report
    report.destination = begun.report_as
    report.options = options.given()
    report.identity = begun.identity
    if not options.dry_run:
        _written(job, destination, options, meter)
        report.seconds = time.perf_counter() - begun.began
    write_page(
        options,
        lambda: build_page(report.to_json(), job.manifest, job.skeleton),
        written=report.destination if report.done else "",
    )
    return report


@dataclass(frozen=True, slots=True)
class _Job:
    """A split that is decided and planned, with nothing written yet.

    Args:
        manifest: of the source, and of what is made for the target.
    """

    manifest: Manifest
    state: Training
    named: Naming
    skeleton: Skeleton
    plan: Plan
    report: SplitReport


def _prepare(begun: _Begun, destination: Path, options: SplitOptions) -> _Job:
    manifest, stripped = _edited(begun, options)
    options, weights_only = without_optimizer(manifest, options)
    manifest, shapes = told(manifest, options)
    request, target = requested(manifest, shapes, options)
    _check_form(begun.report_as, target)
    manifest = run_of_trainer.account(manifest, request, target)
    batch = Rebalanced(manifest, [], [])
    if not is_weights(manifest):
        batch = rebalanced(manifest, request.data_parallel)
        manifest = batch.manifest
    manifest, differing = _agreed(manifest, options)
    named = naming.for_target(manifest, target.name, _asked(options), options.model)
    named = ordered(named, shapes, target.name, options)
    if request.megatron is not None:
        named = for_megatron.fitted(named, request.megatron)
    manifest, request = named.manifest, replace(request, described=named.described)
    request, own = own_states.chosen(manifest, request, target, options)
    state, made = made_state(manifest, request, options)
    if is_single_file(destination):
        request = replace(request, file=destination.name)
    rng = tuple(rank for each in own for rank in each.states)
    state = replace(state, rng=rng, save=save_of(state, request, target))
    laid = run_of_trainer.directory(target.lay_out(state, request), request, target, options)
    skeleton = laid.skeleton
    if not is_single_file(destination):
        skeleton = _with_companions(skeleton, state, request, target, destination.name)
    check_overlaps(skeleton)
    held = stored(skeleton, state)
    carried = request.megatron.carried.entries if request.megatron is not None else ()
    added = [*carried, *copied_files.select_entries(manifest, skeleton)]
    if added:
        manifest = manifest.with_entries([*manifest.entries.values(), *added])
    plan = Plan(manifest.entries, held, options.budget()[1])
    report = describe(state, request, target, laid._replace(skeleton=skeleton), plan)
    report.warnings += [*weights_only, *batch.warnings]
    names = [file.name for file in skeleton.files]
    report.warnings += engines.told(engines.Form(target.name, names, bool(state.groups)))
    report.derived += [*begun.means, *stripped, *named.notes, *made, *batch.derived, *differing]
    for each in own:
        each.tell(report)
    return _Job(manifest, state, named, skeleton, plan, report)


def _edited(begun: _Begun, options: SplitOptions) -> tuple[Manifest, list[str]]:
    """The source without wrappers in its names, and what is to be said of that.

    Raises:
        IncompleteError: it lists weights that no file holds.
    """
    edited = keys.edit(begun.manifest, keys.Edits(strip_wrappers=not _keeps_names(begun, options)))
    manifest = edited.manifest
    weights.refuse_nothing(manifest, manifest.entries)
    placeholders.refuse(manifest, manifest.entries.values())
    if any(not entry.fqn for entry in manifest.entries.values()):
        raise UnsupportedError(
            manifest.origin.path,
            "holds a tensor whose name is empty, as no parameter's is",
            "name it in its file, or write the weights alone: reshard merge --rename '^$=NAME'",
        )
    if manifest.absent:
        raise IncompleteError(
            manifest.origin.path,
            f"lists {weights.describe_missing_values(manifest.absent)}",
            "save it without exclude_frozen_parameters, or write the rest with reshard merge",
        )
    return manifest, [
        f"{len(edited.stripped)} names lose their wrappers: {old} -> {new}"
        for old, new in edited.stripped[:1]
    ]


def _agreed(manifest: Manifest, options: SplitOptions) -> tuple[Manifest, list[str]]:
    """The same with equal heads tied, once what is stored twice was compared; what that showed."""
    with SourceFiles() as pool:
        weights.check_tied_copies(manifest, pool)
        manifest = weights.tie_equal_heads(manifest, pool)
        carried = list(manifest.entries.values())
        if options.without_optimizer:
            carried = list(manifest.of_kind(*WEIGHT_KINDS))
        return manifest, replicas.check(carried, manifest.files, pool, options.replicas)


def _written(job: _Job, destination: Path, options: SplitOptions, meter: Meter | None) -> None:
    """Write it; the report says what came of it."""
    output = write(
        job.plan,
        job.manifest,
        destination,
        options,
        is_directory=not is_single_file(destination),
        check=lambda staging: read_back.check(
            staging / destination.name if is_single_file(destination) else staging,
            *(job.skeleton, job.state, job.named, options),
        ),
        meter=meter,
    )
    report = job.report
    report.overflowed = dict(output.outcome.overflowed)
    report.resumed_bytes = output.resumed_bytes
    report.warnings += output.notes
    report.verified = options.verify
    report.done = True


def _check_form(destination: str, target: Target) -> None:
    """Refuse the name of a file for a directory of them.

    Raises:
        UsageError: it ends as a file does, and the target is no file of torch.save.
    """
    suffix = Path(destination).suffix
    if is_single_file(destination) and not (
        target.name == "torch" and suffix in formats.PLAIN_SUFFIXES
    ):
        raise UsageError(
            destination,
            f"ends in {suffix} as one file does, and --to {target.name} writes "
            + ("one of torch.save" if target.name == "torch" else "a directory"),
            "choose another name; --to torch writes one file where it ends in .pt, .pth or .bin",
        )


def _asked(options: SplitOptions) -> naming.Asked:
    return naming.Asked(
        config=model_config(options) if options.names == "hf" else None,
        whose=options.names,
        family=options.family,
        rules=options.rules,
        words=options.vocab_size,
    )


def _with_companions(
    skeleton: Skeleton, state: Training, request: Request, target: Target, destination: str
) -> Skeleton:
    """Add the companion files beside the state files, or above the directory of a tag.

    A destination that the user called ``checkpoint-N`` is HF Trainer's checkpoint itself.
    """
    if target.name == "hf-trainer":
        from reshard.formats.trainers import hf_trainer

        inside = hf_trainer.directory(state)
        made = with_companions(skeleton, state.manifest, beside=inside, above=inside)
        return skeletons.move_out(made, inside) if hf_trainer.is_checkpoint(destination) else made
    within = str(PurePosixPath(skeleton.files[-1].name).parent) if target.tagged else ""
    run = request.run
    if run is not None and skeleton.files[-1].name.startswith(f"{run.tag}/"):
        return with_companions(skeleton, state.manifest, beside=run.tag, above=run.tag)
    return with_companions(skeleton, state.manifest, beside=within)
