"""The passes of a split: each returns a changed conversion, and appends to its notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from reshard import units
from reshard.checks.identity import refuse_conflicts
from reshard.commands.output import check_overlaps, is_single_file
from reshard.commands.passes import apply_names
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.request import identify_save, resolve_request
from reshard.containers.json_files import read_json_object
from reshard.core import keys
from reshard.core.location import get_directory
from reshard.core.manifest import WEIGHT_KINDS, Skeleton
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats import PLAIN_SUFFIXES, placeholders, run_directory
from reshard.formats.base import StateConversion, Writer
from reshard.formats.coded_values import dequantise, refuse_rounded_scales
from reshard.formats.parameter_kinds import mark_buffers
from reshard.formats.request import LiveTarget, Request
from reshard.model import ModelHint, describe_config, library
from reshard.model.model_order import (
    match_weights,
    order_by_model,
    refuse_other_shapes,
    restore_memory_form,
)
from reshard.naming.options import NameOptions, Naming
from reshard.naming.published import ModelConfig, choose_form, may_be_published
from reshard.state_dict.torch_state_dict import refuse_unwritable_hyper
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.tensors import replicas, weights
from reshard.training import batch as batches
from reshard.training import copied_files, fresh_adam, param_groups, rng
from reshard.training.companion_files import (
    add_derived_config,
    copy_companions,
    find_config,
    is_model_config,
)
from reshard.training.state import WritableState, build_writable_state, refuse_without_optimizer

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut

_LATER: Any = None
_ALSO_CHOOSE_OPTIMIZER = (
    "; the source has no optimizer state either, so also pass --init-optimizer none, or zeros with"
    " --param-groups FILE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConversion(StateConversion):
    """The conversion of a checkpoint to a training state for other ranks.

    Args:
        options: the user's, completed by `choose_optimizer`.
        destination: where the output will be; ``report_as``: as the user wrote it.
        live: the program that loads the output, if it runs already.
        stripped: the note on wrapper prefixes that were removed from the names.
        request, naming, state, layout: from the passes `resolve`, `rename`, `build_state` and
            `lay_out` on.
    """

    options: SplitOptions
    destination: Path
    report_as: str
    live: LiveTarget
    stripped: str = ""
    request: Request = _LATER
    naming: Naming = _LATER
    state: WritableState = _LATER
    layout: LaidOut = _LATER


# Passes before the options of the output are resolved


def decode(split: SplitConversion) -> SplitConversion:
    """Return the split with values for the codes of a quantised model."""
    manifest, notes = dequantise(split.manifest)
    split.notes.derived += notes
    if split.options.dtype:
        refuse_rounded_scales(manifest, split.options.dtype)
    return split.with_manifest(manifest)


def strip_wrappers(split: SplitConversion) -> SplitConversion:
    """Return the split without wrapper prefixes in the names of the source.

    Raises:
        IncompleteError: the source lists weights that no file contains.
        UnsupportedError: a tensor has an empty name.
    """
    is_same_program = split.manifest.origin.format in split.writer.keeps_wrappers_of
    keeps = is_same_program and not split.options.model
    edited = keys.edit(split.manifest, keys.Edits(strip_wrappers=not keeps))
    manifest = edited.manifest
    weights.refuse_empty(manifest, manifest.entries)
    placeholders.refuse(manifest, manifest.entries.values())
    if any(not entry.fqn for entry in manifest.entries.values()):
        raise UnsupportedError(
            manifest.origin.path,
            "contains a tensor with an empty name, which no parameter can have",
            "name the tensor in its file, or write only the weights: reshard merge --rename"
            " '^$=NAME'",
        )
    if manifest.absent:
        raise IncompleteError(
            manifest.origin.path,
            f"lists {weights.describe_missing_values(manifest.absent)}",
            "save it without exclude_frozen_parameters, or write the rest with reshard merge",
        )
    stripped = ""
    if edited.stripped:
        old, new = edited.stripped[0]
        count = units.counted(len(edited.stripped), "name")
        stripped = f"{count} without wrapper prefixes, e.g. {old} -> {new}"
        split.notes.derived.append(stripped)
    return replace(split.with_manifest(manifest), stripped=stripped)


def choose_optimizer(split: SplitConversion) -> SplitConversion:
    """Return the split of weights alone if the source has nothing else, with a note on that.

    For a layout that needs an optimizer the options stay: the user must then decide what
    happens to it.
    """
    manifest, options, writer = split.manifest, split.options, split.writer
    is_decided = options.init_optimizer or options.weights_only or options.param_groups
    train = manifest.train
    has_optimizer = manifest.has_optimizer or manifest.unnamed_optimizers or train.param_groups
    if is_decided or has_optimizer or not writer.weights_alone:
        return split
    advice = " (--init-optimizer zeros starts an Adam)" if writer.starts_optimizer else ""
    others = run_directory.list_others(manifest.origin.path)
    if others:
        advice += f"; other checkpoints of the run, which may have it: {units.abridge(others)}"
    split.notes.warnings.append(
        f"weights only (--init-optimizer none): the source has no optimizer state{advice}"
    )
    return replace(split, options=replace(options, init_optimizer="none"))


def leave_out_optimizer(split: SplitConversion) -> SplitConversion:
    """Return the split without the slots of an optimizer that the output does not have.

    The passes that rename could not convert all of them: Adafactor's have other shapes than their
    weights.
    """
    if not split.options.without_optimizer:
        return split
    entries = split.manifest.entries
    manifest = split.manifest.with_entries(split.manifest.of_kind(*WEIGHT_KINDS))
    left_out = len(entries) - len(manifest.entries)
    return replace(split.with_manifest(manifest), slots_left_out=left_out)


def resolve_model(split: SplitConversion) -> SplitConversion:
    """Return the split with the user's model; for weights alone, with that of a config beside them.

    Files of weights alone have no order, and one name of a tied weight. With a model, the returned
    split has both. A live model orders states that have no order.

    Raises:
        IncompleteError: an optimizer is to be created, and nothing states the model.
        UsageError: the weights belong to another model.
    """
    manifest, options = split.manifest, split.options
    if not split.writer.needs_shapes:
        return split
    shapes = split.live.shapes
    if shapes is None and options.model:
        shapes = ModelHint(options.model, options.wrap).shapes()
    if not may_be_published(manifest):
        if shapes is not None and options.model:
            refuse_other_shapes(manifest.weight_shapes, shapes)
        if split.live.shapes is not None and not manifest.ordered:
            manifest = order_by_model(manifest, split.live.shapes)
        return replace(split, manifest=manifest, shapes=shapes)
    if shapes is not None:
        return replace(split, manifest=match_weights(manifest, shapes), shapes=shapes)
    config = get_directory(manifest.origin.path) / "config.json"
    problem, remedy = "", "pass the model: --model config.json|DIR|module:factory"
    if config.is_file() and is_model_config(config):
        try:
            shapes = ModelHint(str(config), options.wrap).shapes()
            return replace(split, manifest=match_weights(manifest, shapes), shapes=shapes)
        except (UsageError, UnsupportedError) as error:
            problem = f"{config}: {error.problem}"
            remedy = error.remedy or remedy
    if options.init_optimizer == "zeros" and not manifest.ordered:
        raise IncompleteError(
            manifest.origin.path,
            problem or "does not state which tensors are parameters, and in which order",
            remedy,
        )
    warnings = (*manifest.warnings, *filter(None, [problem]))
    return split.with_manifest(replace(manifest, warnings=warnings))


def resolve(split: SplitConversion) -> SplitConversion:
    """Return the split with the options of the output resolved.

    Raises:
        UsageError: an option has no effect on the layout, or a value that it cannot have.
    """
    writer, name = split.writer, split.report_as
    request = resolve_request(split.manifest, split.shapes, writer, split.options)
    is_file, suffix = is_single_file(name), Path(name).suffix
    if is_file and not (writer.writes_file and suffix in PLAIN_SUFFIXES):
        raise UsageError(
            name,
            f"has the suffix {suffix} of a file, but --to {writer.name} writes "
            + ("a torch.save file" if writer.writes_file else "a directory"),
            "choose another name; --to torch writes one file if it ends in .pt, .pth or .bin",
        )
    file = split.destination.name if is_single_file(split.destination) else None
    return replace(split, request=replace(request, file=file, live=split.live))


# Passes over the conversion


def keep_run(split: SplitConversion) -> SplitConversion:
    """Return the split with the state of a run of our trainer, for the new ranks.

    A resume takes the number of ranks from that state, unless the user gives another one.
    """
    run, request, manifest = split.request.run, split.request, split.manifest
    if run is None:
        return split
    settings = split.writer.settings_of_run(request)
    train = replace(
        manifest.train, trainer_state=run.build_document(request.world_size, **settings)
    )
    return split.with_manifest(replace(manifest, train=train))


def rebalance_batch(split: SplitConversion) -> SplitConversion:
    """Return the split with the micro batch and accumulation that keep the global batch."""
    manifest = split.manifest
    if manifest.origin.weights_only:
        return split
    batch = batches.rebalance_batch(manifest, split.request.data_parallel, split.live.batch)
    split.notes.derived += batch.derived
    split.notes.warnings += batch.warnings
    return split.with_manifest(batch.manifest)


def compare_copies(split: SplitConversion) -> SplitConversion:
    """Return the split with equal heads tied, after a comparison of what is stored twice."""
    manifest, policy = split.manifest, split.options.replicas
    with SourceFiles(manifest.files) as pool:
        weights.check_tied_copies(manifest, pool)
        manifest = weights.tie_equal_heads(manifest, pool)
        entries = manifest.entries.values()
        split.notes.derived += replicas.check(entries, manifest.files, pool, policy)
    return split.with_manifest(manifest)


def rename(split: SplitConversion) -> SplitConversion:
    """Return the split under the parameter names of the output, in the order that it needs.

    Raises:
        UsageError: the names of the files are fixed, and the user asks for others.
    """
    writer, options = split.writer, split.options
    if writer.has_fixed_names and options.names is not None:
        raise UsageError(f"--names {options.names}", f"has no effect with --to {writer.name}")
    is_foreign = split.source.has_foreign_names(writer) and not writer.has_fixed_names
    has_config = options.names == "hf" or (is_foreign and options.names is None)
    named = writer.rename(
        split,
        NameOptions(
            # If --model names code, there is no such file.
            config=_read_config(as_path(options.model)) if has_config and options.model else None,
            names=options.names,
            family=options.family,
            rules=options.rules,
            vocab_size=options.vocab_size,
        ),
    )
    _compare_merged(split, named)
    split = _choose_form(apply_names(split, named))
    manifest, request = split.manifest, split.request
    needs_order = writer.numbers_parameters(request) and not request.weights_only
    has_model_names = named.described is None
    if needs_order and has_model_names and not manifest.ordered:
        shapes = split.shapes
        if shapes is None and named.config is not None:
            shapes = describe_config(named.config, manifest.origin.path)
        if shapes is not None:
            manifest = order_by_model(restore_memory_form(manifest, shapes), shapes)
    named = named._replace(manifest=manifest)
    request = replace(request, described=named.described)
    return replace(split, manifest=manifest, naming=named, request=request)


def _compare_merged(split: SplitConversion, named: Naming) -> None:
    if named.merged:
        files, policy = named.manifest.files, split.options.replicas
        entries = [e for e in named.manifest.of_kind(*WEIGHT_KINDS) if e.fqn in named.merged]
        with SourceFiles(files) as pool:
            split.notes.derived += replicas.check(entries, files, pool, policy)


def _choose_form(split: SplitConversion) -> SplitConversion:
    options, manifest, named = split.options, split.manifest, split.naming
    names = options.names
    is_renamed = named.config is not None  # by a table, to the published names
    if names is None and named.config is not None and library.may_be_converted(named.config):
        names = "module"  # what loads a training state has the model in memory
    if names not in ("hf", "module") or (names == "hf" and is_renamed):
        return split
    if names == "hf" and split.writer.needs_order:
        raise UsageError(
            f"--names hf with --to {split.writer.name}",
            "is not possible: its optimizer refers to the model's parameters in memory by number",
            "choose --names module, or leave out --names",
        )
    config = ModelConfig(named.config) if named.config is not None else None
    path = as_path(options.model) if options.model else find_config(manifest)
    if config is None and path is not None:
        content = _read_config(path)
        config = ModelConfig(content, path) if content is not None else None
    form = choose_form(manifest, config, names)
    split.notes.derived += form.notes
    split.notes.warnings += form.warnings
    return replace(split, manifest=form.manifest)


def _read_config(path: Path) -> Mapping[str, Any] | None:
    file = path / "config.json" if path.is_dir() else path
    return read_json_object(file) if file.is_file() else None


def choose_random_states(split: SplitConversion) -> SplitConversion:
    """Return the split with the random states to write; by default all that can be kept.

    Raises:
        CorruptError: a file of states belongs to another rank.
        IncompleteError: the source has no states that could be kept.
        UnsupportedError: the layout has no place for them.
        UsageError: states of another number of ranks are to be kept.
    """
    manifest, request, notes = split.manifest, split.request, split.notes
    options, files, policy = split.options, manifest.train.rng_files, request.rng
    has_none = manifest.train.rng is None and not files
    is_to_copy = policy in ("keep", "derive")
    # A writer with random states of its own has handled them in `adapt`.
    if split.writer.find_random_states(request) == "own" or (has_none and not is_to_copy):
        return split
    if has_none:
        is_decided = manifest.has_optimizer or options.without_optimizer or options.init_optimizer
        raise IncompleteError(
            manifest.origin.path,
            f"has no random states, so --rng {policy} is not possible",
            "leave it out" + ("" if is_decided else _ALSO_CHOOSE_OPTIMIZER),
        )
    if policy == "drop" or request.weights_only:
        reason = "--rng drop" if policy == "drop" else request.weights_option
        notes.dropped.append(f"random states ({reason})")
        return split
    if split.writer.copies_values(split):
        notes.kept.append("random states as the source has them")
        return split
    obstacle = _find_obstacle_to_random_states(split)
    if obstacle is not None:
        if policy:
            raise obstacle
        notes.dropped.append(f"random states: {obstacle.where} {obstacle.problem}")
        return split
    if options.trust != "none":  # each file of states must belong to its rank
        refuse_conflicts(rng.describe_files(files))
    states, ranks = rng.read(files), request.world_size
    if policy != "derive":
        notes.kept.append(f"random states of {units.counted(ranks, 'rank')}")
        return replace(split, rng=states)
    devices = sorted({name for state in states for name in state.devices})
    left = f"; those of {', '.join(devices)} are left out" if devices else ""
    of_ranks = units.counted(ranks, "rank")
    notes.derived.append(f"random states of {of_ranks}, seeded from rank 0's and the rank{left}")
    return replace(split, rng=rng.derive(states[0], ranks))


def _find_obstacle_to_random_states(
    split: SplitConversion,
) -> IncompleteError | UnsupportedError | UsageError | None:
    manifest, request, writer = split.manifest, split.request, split.writer
    files, where = manifest.train.rng_files, manifest.origin.path
    if writer.find_random_states(request) == "none":
        return UnsupportedError(
            f"--to {writer.name}", "has no place for the random states of ranks"
        )
    if not files or not rng.has_states(files[0]):
        return IncompleteError(
            where,
            "has no file of random states per rank, which are the only ones that can be copied",
            "leave them out: --rng drop",
        )
    before, ranks = manifest.origin.world, request.world_size
    if request.rng != "derive" and not len(files) == before == ranks:
        return UsageError(
            where,
            f"has random states of {units.counted(len(files), 'rank')}, which do not fit the"
            f" {units.counted(ranks, 'rank')} of the output",
            "create new ones with --rng derive, or leave them out with --rng drop",
        )
    return None


def adapt(split: SplitConversion) -> SplitConversion:
    """Return the split with what its writer and its source change.

    Parts that the writer has no place for are noted.
    """
    source, writer = split.source, split.writer
    if source.name_own_parts is not None and source.writer != writer.name:
        parts = source.name_own_parts(split.manifest)
        reason = f"--to {writer.name} cannot store them"
        split.notes.dropped += [f"{parts}: {reason}"] if parts else []
    if source.translate is not None and source.writer != writer.name:
        manifest, notes = source.translate(split.manifest)
        split.notes.derived += notes
        split = split.with_manifest(manifest)
    adapted = writer.adapt(split)
    if split.stripped and writer.copies_values(adapted):
        adapted.notes.derived.remove(split.stripped)  # the keys of the output keep the prefixes
    return adapted


# The training state to write, and its files


def build_state(split: SplitConversion) -> SplitConversion:
    """Return the split with the state to write: the optimizer and groups are the user's choice."""
    request, notes, options, writer = split.request, split.notes, split.options, split.writer
    state = build_writable_state(
        split.manifest,
        weights_only=request.weights_only,
        may_lack_weights=writer.copies_values(split),
    )
    groups = param_groups.read(options.param_groups) if options.param_groups else None
    is_live = bool(split.live.groups) and not request.weights_only
    is_new = options.init_optimizer == "zeros"
    if is_new and not state.groups and not is_live:
        groups = groups or param_groups.ONE
        state = mark_buffers(state, request.model, "a new optimizer trains only parameters")
    if not is_new and not request.weights_only:
        others = [] if state.members else run_directory.list_others(split.manifest.origin.path)
        refuse_without_optimizer(state, can_start=writer.starts_optimizer, others=others)
    if groups:
        state, derived = param_groups.regroup(state, groups)
        notes.derived += derived
    if is_live:
        state, derived = param_groups.follow_live(state, split.live.groups)
        notes.derived += derived
    if (
        writer.writes_zero(request)
        and not request.weights_only
        and not _keeps_unnamed_members(state, request, writer)
    ):
        state, derived = param_groups.drop_empty_groups(state)
        notes.derived += derived
    if is_new:
        state, derived = fresh_adam.start_adam(state, request.master_dtype)
        notes.derived += derived
    elif not request.weights_only and writer.needs_every_state(request):
        state, derived = fresh_adam.start_idle(state, request.master_dtype)
        notes.derived += derived
    if not request.weights_only:
        refuse_unwritable_hyper(state)
    save = identify_save(state, request, writer)
    return replace(split, state=replace(state, rng=split.rng, save=save))


def _keeps_unnamed_members(state: WritableState, request: Request, writer: Writer) -> bool:
    # DeepSpeed has no group without parameters. A group that names none has only parameters without
    # elements, which DeepSpeed allows at the stages 0 and 3 (0.19.8 ``runtime/utils.py``,
    # ``is_optimized_parameter``); at the stages 1 and 2 it fails when the engine is made.
    stages = {state.manifest.origin.zero_stage, request.zero_stage}
    named = {member.fqn for member in state.members}
    return (
        stages <= {0, 3}
        and writer.numbers_parameters(request)
        and not state.regrouped
        and any(0 in weight.shape and weight.fqn not in named for weight in state.weights)
    )


def lay_out(split: SplitConversion) -> SplitConversion:
    """Return the split with its files, and with entries for what they copy beside the state."""
    writer, request, state = split.writer, split.request, split.state
    manifest, layout = split.manifest, writer.lay_out(state, request)
    skeleton = layout.skeleton
    if not is_single_file(split.destination):
        beside, above = writer.find_companion_folders(skeleton, state, request)
        skeleton, notes = copy_companions(skeleton, state.manifest, beside=beside, above=above)
        split.notes.warnings += notes
        skeleton = _add_config(split, skeleton, beside)
        skeleton = writer.place(skeleton, state, split.destination.name)
    check_overlaps(skeleton)
    added = [
        *writer.list_own_entries(request),
        *copied_files.select_entries(manifest, skeleton),
        *layout.copied,
    ]
    if added:
        manifest = manifest.with_entries([*manifest.entries.values(), *added])
    return replace(split, manifest=manifest, layout=layout._replace(skeleton=skeleton))


def _add_config(split: SplitConversion, skeleton: Skeleton, at: str) -> Skeleton:
    config = split.naming.config
    has_config = any(PurePosixPath(file.name).name == "config.json" for file in skeleton.files)
    if config is None or has_config:
        return skeleton
    skeleton, note = add_derived_config(skeleton, config, split.state, split.request.dtype, at)
    split.notes.derived.append(note)
    return skeleton
