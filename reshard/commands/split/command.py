"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from reshard import formats, keys, replicas, weights
from reshard.commands import naming
from reshard.commands.companions import with_companions
from reshard.commands.naming import Naming
from reshard.commands.output import opened, page_of, write
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter
from reshard.commands.split import for_megatron, own_states
from reshard.commands.split.batch import rebalanced
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport, describe
from reshard.commands.split.request import requested
from reshard.commands.split.state import is_weights, made_state, stored, told
from reshard.commands.target import check_places
from reshard.dtypes import DType
from reshard.errors import DifferentError, IncompleteError
from reshard.files import SourceFiles
from reshard.formats.targets import Target
from reshard.formats.training import Training
from reshard.manifest import WEIGHT_KINDS, Chunk, Entry, Manifest, Skeleton
from reshard.paths import as_path
from reshard.plan.planner import Plan


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
    sources, place = formats.as_paths(source), as_path(destination).resolve()
    check_page(options, sources, place)
    manifest = opened(sources, place, options, is_directory=True)
    kinds = WEIGHT_KINDS if options.without_optimizer else None
    with replicas.averaged(manifest, options.replicas, kinds) as (averaged, means):
        begun = _Begun(averaged, str(destination), began, means)
        return _split(begun, place, options, meter)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A split whose source is open.

    Args:
        report_as: the destination as the user wrote it.
        began: when, as `time.perf_counter` has it.
        means: what to say of copies that were averaged.
    """

    manifest: Manifest
    report_as: str
    began: float
    means: Sequence[str]


def _keeps_names(begun: _Begun, options: SplitOptions) -> bool:
    """Whether the run to come calls its parameters as this one: it is the same code."""
    is_deepspeed = begun.manifest.origin.format.startswith("deepspeed")
    return is_deepspeed and options.to in (None, "deepspeed", "ds-universal") and not options.model


def _split(
    begun: _Begun, destination: Path, options: SplitOptions, meter: Meter | None
) -> SplitReport:
    edited = keys.edit(begun.manifest, keys.Edits(strip_wrappers=not _keeps_names(begun, options)))
    manifest = edited.manifest
    if manifest.absent:
        raise IncompleteError(
            manifest.origin.path,
            f"lists {weights.without_value(manifest.absent)}",
            "save it without exclude_frozen_parameters, or write the rest with reshard merge",
        )
    manifest, shapes = told(manifest, options)
    request, target = requested(manifest, shapes, options)
    batch_notes: list[str] = []
    if not is_weights(manifest):
        manifest, batch_notes = rebalanced(manifest, request.data_parallel)
    with SourceFiles() as pool:
        weights.refuse_diverged(manifest, pool)
        manifest = weights.with_equal_heads_tied(manifest, pool)
        carried = list(manifest.entries.values())
        if options.without_optimizer:
            carried = list(manifest.of_kind(*WEIGHT_KINDS))
        differing = replicas.check(carried, manifest.files, pool, options.replicas)
    named = naming.for_target(manifest, target.name, _asked(options), options.model)
    if request.megatron is not None:
        named = for_megatron.fitted(named, request.megatron)
    manifest, request = named.manifest, replace(request, described=named.described)
    request, own = own_states.chosen(manifest, request, target, options)
    state, made = made_state(manifest, request, options)
    state = replace(state, rng=tuple(rank for each in own for rank in each.states))
    laid = target.lay_out(state, request)
    skeleton = _with_companions(laid.skeleton, state, target)
    check_places(skeleton)
    held = stored(skeleton, state)
    if request.megatron is not None:
        manifest = manifest.with_entries(
            [*manifest.entries.values(), *request.megatron.carried.entries]
        )
    planned = Plan(manifest.entries, held, options.budget()[1])
    report = describe(state, request, target, laid._replace(skeleton=skeleton), planned)
    report.destination = begun.report_as
    stripped = [
        f"{len(edited.stripped)} names lose their wrappers: {old} -> {new}"
        for old, new in edited.stripped[:1]
    ]
    report.derived += [*begun.means, *stripped, *named.notes, *made, *batch_notes, *differing]
    for each in own:
        each.tell(report)
    if options.dry_run:
        write_page(options, lambda: page_of(report.to_json(), manifest, skeleton))
        return report
    output = write(
        planned,
        manifest,
        destination,
        options,
        is_directory=True,
        look=lambda staging: _look(staging, skeleton, state, named, options),
        meter=meter,
    )
    report.overflowed = dict(output.outcome.overflowed)
    report.resumed_bytes = output.resumed_bytes
    report.warnings += output.notes
    report.verified = options.verify
    report.done = True
    report.seconds = time.perf_counter() - begun.began
    write_page(options, lambda: page_of(report.to_json(), manifest, skeleton))
    return report


def _asked(options: SplitOptions) -> naming.Asked:
    return naming.Asked(
        whose=options.names,
        family=options.family,
        rules=options.rules,
        words=options.vocab_size,
    )


def _with_companions(skeleton: Skeleton, state: Training, target: Target) -> Skeleton:
    """What lies beside the state files goes beside them; above a tag's directory, above it."""
    if target.name == "hf-trainer":
        from reshard.formats import hf_trainer

        inside = hf_trainer.directory(state)
        return with_companions(skeleton, state.manifest, beside=inside, above=inside)
    within = str(PurePosixPath(skeleton.files[-1].name).parent) if target.tagged else ""
    return with_companions(skeleton, state.manifest, beside=within)


def _look(
    staging: Path, skeleton: Skeleton, state: Training, named: Naming, options: SplitOptions
) -> None:
    """Read the output as a stranger would: its reader must find what was planned, and all of it.

    Raises:
        DifferentError: it is something else.
    """
    seen = formats.read(staging, model=options.model, wrap=options.wrap, rules=options.rules)
    planned = _by_name(skeleton.entries, named)
    tied = {named.own(alias): named.own(kept) for alias, kept in state.manifest.tied.items()}
    for fqn, found in _by_name(seen.entries.values(), named).items():  # one tensor's chunks at once
        wanted = [*planned.get(fqn, ()), *planned.get(tied.get(fqn, fqn), ())]
        places = {_place(chunk, f"{staging}/") for entry in wanted for chunk in entry.chunks}
        for chunk in (chunk for entry in found for chunk in entry.chunks if chunk.box.volume):
            if _place(chunk) not in places and not _is_padding(chunk, wanted):
                raise DifferentError(
                    chunk.file,
                    f"holds {fqn!r} at byte {chunk.byte_offset}, where it was not put: the files of"
                    " the output do not say what is in them",
                )
    _check_all(seen, state, named)


def _by_name(entries: Iterable[Entry], named: Naming) -> dict[str, list[Entry]]:
    found = defaultdict(list)
    for entry in entries:
        found[named.own(entry.fqn)].append(entry)
    return found


def _place(chunk: Chunk, staging: str = "") -> tuple[str, int, DType]:
    return staging + chunk.file, chunk.byte_offset, chunk.dtype


def _is_padding(chunk: Chunk, wanted: Sequence[Entry]) -> bool:
    """Whether it begins behind the tensor: a rank's part that is all rows of no word."""
    ends = (zip(chunk.box.origin, entry.shape, strict=False) for entry in wanted)
    return any(at >= size for dims in ends for at, size in dims)


def _check_all(seen: Manifest, state: Training, named: Naming) -> None:
    """Every weight and every optimizer slot is there again.

    Raises:
        DifferentError: one is not.
    """
    names = {named.own(fqn) for fqn in (*(e.fqn for e in seen.entries.values()), *seen.tied)}
    slots = {(entry.kind, named.own(entry.fqn)) for entry in seen.entries.values()}
    for weight in state.weights:
        if named.own(weight.fqn) not in names:
            raise DifferentError(weight.fqn, "does not read back")
    for group in state.groups:
        for member in group.members:
            for slot, entry in member.slots.items():
                if entry.numel and (slot, named.own(member.fqn)) not in slots:
                    raise DifferentError(member.fqn, f"its {slot} does not read back")
