"""The passes of a split: each returns a changed conversion, and appends to its notes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard import units
from reshard.checks.identity import refuse_conflicts
from reshard.commands.passes import apply_names
from reshard.commands.split.options import SplitOptions
from reshard.containers.json_files import read_json_object
from reshard.core import keys
from reshard.core.dtypes import DType
from reshard.core.location import get_directory
from reshard.core.manifest import WEIGHT_KINDS, Manifest, Skeleton
from reshard.core.stamps import Save
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats import placeholders, run
from reshard.formats.base import Conversion, StateConversion, Writer
from reshard.formats.parameter_kinds import mark_buffers
from reshard.formats.request import Request
from reshard.layouts.mesh import MeshGrid
from reshard.layouts.model_parallel.sizes import Sizes
from reshard.model import ModelHint, ModelShapes, describe_config, library
from reshard.model.order import (
    match_weights,
    order_by_model,
    refuse_other_shapes,
    restore_memory_form,
)
from reshard.naming.options import NameOptions, Naming
from reshard.naming.published import ModelConfig, choose_form, may_be_published
from reshard.state_dict.torch_state_dict import refuse_unwritable_hyper
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.tensors import replicas, weights
from reshard.training import batch as batches
from reshard.training import fresh_adam, param_groups, rng
from reshard.training.companion_files import find_config, is_model_config
from reshard.training.state import WritableState, build_writable_state, refuse_without_optimizer

_ID = 32  # characters of a save's id
_SAMPLES, _SAMPLE_BYTES = 4, 4096  # samples of each file without checksums
# Fields of a request that do not decide the layout.
_NOT_IN_ID = {"keeps_layout", "model_hint", "rng", "weights_option"}
_ALSO_CHOOSE_OPTIMIZER = (
    "; the source has no optimizer state either, so also pass --init-optimizer none, or zeros with"
    " --param-groups FILE"
)


# Passes before the options of the output are resolved


def strip_wrappers(conversion: Conversion, writer: Writer, options: SplitOptions) -> Conversion:
    """Return the conversion without wrapper prefixes in the names of the source.

    Raises:
        IncompleteError: the source lists weights that no file contains.
        UnsupportedError: a tensor has an empty name.
    """
    keeps = conversion.manifest.origin.format in writer.keeps_wrappers_of and not options.model
    edited = keys.edit(conversion.manifest, keys.Edits(strip_wrappers=not keeps))
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
    if edited.stripped:
        old, new = edited.stripped[0]
        count = units.counted(len(edited.stripped), "name")
        conversion.notes.derived.append(f"{count} without wrapper prefixes, e.g. {old} -> {new}")
    return conversion.with_manifest(manifest)


def choose_optimizer(conversion: Conversion, writer: Writer, options: SplitOptions) -> SplitOptions:
    """Return the options for weights alone if the source has nothing else, with a note on that.

    For a layout that needs an optimizer the options stay: the user must then decide what
    happens to it.
    """
    manifest = conversion.manifest
    is_decided = options.init_optimizer or options.weights_only or options.param_groups
    train = manifest.train
    has_optimizer = manifest.has_optimizer or manifest.unnamed_optimizers or train.param_groups
    if is_decided or has_optimizer or not writer.weights_alone:
        return options
    advice = " (--init-optimizer zeros starts an Adam)" if writer.starts_optimizer else ""
    others = run.list_others(manifest.origin.path)
    if others:
        advice += f"; other checkpoints of the run, which may have it: {units.some(others)}"
    conversion.notes.warnings.append(
        f"weights only (--init-optimizer none): the source has no optimizer state{advice}"
    )
    return replace(options, init_optimizer="none")


def resolve_model(
    conversion: Conversion,
    writer: Writer,
    options: SplitOptions,
    given: ModelShapes | None,
) -> tuple[Conversion, ModelShapes | None]:
    """Return the model that the user names; for weights alone, the one of the config beside them.

    Files of weights alone have no order, and one name of a tied weight. With a model, the returned
    conversion has both.

    Args:
        given: the model, if the caller has it; it orders states that have no order.

    Raises:
        IncompleteError: an optimizer is to be created, and nothing states the model.
        UsageError: the weights belong to another model.
    """
    manifest = conversion.manifest
    if not writer.needs_shapes:
        return conversion, None
    shapes = given
    if shapes is None and options.model:
        shapes = ModelHint(options.model, options.wrap).shapes()
    if not may_be_published(manifest):
        if shapes is not None and options.model:
            refuse_other_shapes(manifest.weight_shapes, shapes)
        if given is not None and not manifest.ordered:
            conversion = conversion.with_manifest(order_by_model(manifest, given))
        return conversion, shapes
    if shapes is not None:
        return conversion.with_manifest(match_weights(manifest, shapes)), shapes
    config = get_directory(manifest.origin.path) / "config.json"
    problem, remedy = "", "pass the model: --model config.json|DIR|module:factory"
    if config.is_file() and is_model_config(config):
        try:
            shapes = ModelHint(str(config), options.wrap).shapes()
            return conversion.with_manifest(match_weights(manifest, shapes)), shapes
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
    return conversion.with_manifest(replace(manifest, warnings=warnings)), None


# Passes over the conversion


def keep_run(conversion: StateConversion) -> StateConversion:
    """Return the conversion with the state of a run of our trainer, for the new ranks.

    A resume takes the number of ranks from that state, unless the user gives another one.
    """
    run, request, manifest = conversion.request.run, conversion.request, conversion.manifest
    if run is None:
        return conversion
    settings = conversion.writer.settings_of_run(request)
    train = replace(
        manifest.train, trainer_state=run.build_document(request.world_size, **settings)
    )
    return conversion.with_manifest(replace(manifest, train=train))


def rebalance_batch(conversion: StateConversion) -> StateConversion:
    """Return the conversion with the micro batch and accumulation that keep the global batch."""
    manifest, request = conversion.manifest, conversion.request
    if manifest.origin.weights_only:
        return conversion
    batch = batches.rebalance_batch(manifest, request.data_parallel, request.live_batch)
    conversion.notes.derived += batch.derived
    conversion.notes.warnings += batch.warnings
    return conversion.with_manifest(batch.manifest)


def compare_copies(conversion: StateConversion, policy: replicas.Replicas) -> StateConversion:
    """Return the conversion with equal heads tied, after a comparison of what is stored twice."""
    manifest = conversion.manifest
    with SourceFiles(manifest.files) as pool:
        weights.check_tied_copies(manifest, pool)
        manifest = weights.tie_equal_heads(manifest, pool)
        entries = list(manifest.entries.values())
        if conversion.request.weights_only:
            entries = list(manifest.of_kind(*WEIGHT_KINDS))
        conversion.notes.derived += replicas.check(entries, manifest.files, pool, policy)
    return conversion.with_manifest(manifest)


def rename(conversion: StateConversion, options: SplitOptions) -> StateConversion:
    """Return the conversion under the parameter names of the output, in the order that it needs.

    Raises:
        UsageError: the names of the files are fixed, and the user asks for others.
    """
    writer = conversion.writer
    if writer.has_fixed_names and options.names is not None:
        raise UsageError(f"--names {options.names}", f"has no effect with --to {writer.name}")
    is_foreign = conversion.source.has_foreign_names(writer) and not writer.has_fixed_names
    has_config = options.names == "hf" or (is_foreign and options.names is None)
    named = writer.rename(
        conversion,
        NameOptions(
            # If --model names code, there is no such file.
            config=_read_config(as_path(options.model)) if has_config and options.model else None,
            names=options.names,
            family=options.family,
            rules=options.rules,
            vocab_size=options.vocab_size,
        ),
    )
    _compare_merged(conversion, named, options.replicas)
    conversion = apply_names(conversion, named)
    conversion = _choose_form(conversion, named, options)
    manifest, request = conversion.manifest, conversion.request
    needs_order = writer.numbers_parameters(request) and not request.weights_only
    has_model_names = named.described is None
    if needs_order and has_model_names and not manifest.ordered:
        shapes = conversion.shapes
        if shapes is None and named.config is not None:
            shapes = describe_config(named.config, manifest.origin.path)
        if shapes is not None:
            manifest = order_by_model(restore_memory_form(manifest, shapes), shapes)
    named = named._replace(manifest=manifest)
    request = replace(request, described=named.described)
    return replace(conversion, manifest=manifest, naming=named, request=request)


def _compare_merged(conversion: StateConversion, named: Naming, policy: replicas.Replicas) -> None:
    """Compare the values of tensors that became one under the output's names."""
    if named.merged:
        entries = [e for e in named.manifest.of_kind(*WEIGHT_KINDS) if e.fqn in named.merged]
        with SourceFiles(named.manifest.files) as pool:
            conversion.notes.derived += replicas.check(entries, named.manifest.files, pool, policy)


def _choose_form(
    conversion: StateConversion, named: Naming, options: SplitOptions
) -> StateConversion:
    """Return the conversion with the names that transformers writes, or those of its model."""
    names, manifest = options.names, conversion.manifest
    is_renamed = named.config is not None  # by a table, to the published names
    if names is None and named.config is not None and library.may_be_converted(named.config):
        names = "module"  # what loads a training state has the model in memory
    if names not in ("hf", "module") or (names == "hf" and is_renamed):
        return conversion
    if names == "hf" and conversion.writer.needs_order:
        raise UsageError(
            f"--names hf with --to {conversion.writer.name}",
            "is not possible: its optimizer refers to the model's parameters in memory by number",
            "choose --names module, or leave out --names",
        )
    config = ModelConfig(named.config) if named.config is not None else None
    path = as_path(options.model) if options.model else find_config(manifest)
    if config is None and path is not None:
        content = _read_config(path)
        config = ModelConfig(content, path) if content is not None else None
    form = choose_form(manifest, config, names)
    conversion.notes.derived += form.notes
    conversion.notes.warnings += form.warnings
    return replace(conversion, manifest=form.manifest)


def _read_config(path: Path) -> Mapping[str, Any] | None:
    """Return the config of a path, or of its directory; None if there is no such file."""
    file = path / "config.json" if path.is_dir() else path
    return read_json_object(file) if file.is_file() else None


def choose_random_states(conversion: StateConversion, options: SplitOptions) -> StateConversion:
    """Return the conversion with the random states to write; by default all that can be kept.

    Raises:
        CorruptError: a file of states belongs to another rank.
        IncompleteError: the source has no states that could be kept.
        UnsupportedError: the layout has no place for them.
        UsageError: states of another number of ranks are to be kept.
    """
    manifest, request, notes = conversion.manifest, conversion.request, conversion.notes
    files, policy = manifest.train.rng_files, request.rng
    has_none = manifest.train.rng is None and not files
    is_to_copy = policy in ("keep", "derive")
    # A writer with random states of its own has handled them in `adapt`.
    if conversion.writer.find_random_states(request) == "own" or (has_none and not is_to_copy):
        return conversion
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
        return conversion
    if conversion.writer.copies_values(conversion):
        notes.kept.append("random states as the source has them")
        return conversion
    obstacle = _find_obstacle_to_random_states(conversion)
    if obstacle is not None:
        if policy:
            raise obstacle
        notes.dropped.append(f"random states: {obstacle.where} {obstacle.problem}")
        return conversion
    if options.trust != "none":  # each file of states must belong to its rank
        refuse_conflicts(rng.describe_files(files))
    states, ranks = rng.read(files), request.world_size
    if policy != "derive":
        notes.kept.append(f"random states of {units.counted(ranks, 'rank')}")
        return replace(conversion, rng=states)
    devices = sorted({name for state in states for name in state.devices})
    left = f"; those of {', '.join(devices)} are left out" if devices else ""
    of_ranks = units.counted(ranks, "rank")
    notes.derived.append(f"random states of {of_ranks}, seeded from rank 0's and the rank{left}")
    return replace(conversion, rng=rng.derive(states[0], ranks))


def _find_obstacle_to_random_states(
    conversion: StateConversion,
) -> IncompleteError | UnsupportedError | UsageError | None:
    """Return why random states can be neither kept nor derived, or None."""
    manifest, request, writer = conversion.manifest, conversion.request, conversion.writer
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


def adapt(conversion: StateConversion) -> StateConversion:
    """Return the conversion with what its writer and its source change.

    Parts that the writer has no place for are noted.
    """
    source, writer = conversion.source, conversion.writer
    if source.name_own_parts is not None and source.writer != writer.name:
        parts = source.name_own_parts(conversion.manifest)
        reason = f"--to {writer.name} cannot store them"
        conversion.notes.dropped += [f"{parts}: {reason}"] if parts else []
    if source.translate is not None and source.writer != writer.name:
        manifest, notes = source.translate(conversion.manifest)
        conversion.notes.derived += notes
        conversion = conversion.with_manifest(manifest)
    return writer.adapt(conversion)


# The training state to write


def build_state(conversion: StateConversion, options: SplitOptions) -> WritableState:
    """Return the training state to write, with the optimizer and groups that the user chose."""
    request, notes = conversion.request, conversion.notes
    state = build_writable_state(
        conversion.manifest,
        weights_only=request.weights_only,
        may_lack_weights=conversion.writer.copies_values(conversion),
    )
    groups = param_groups.read(options.param_groups) if options.param_groups else None
    is_live = bool(request.live_groups) and not request.weights_only
    is_new = options.init_optimizer == "zeros"
    if is_new and not state.groups and not is_live:
        groups = groups or param_groups.ONE
        state = mark_buffers(state, request.model, "a new optimizer trains only parameters")
    if not is_new and not request.weights_only:
        others = [] if state.members else run.list_others(conversion.manifest.origin.path)
        refuse_without_optimizer(state, can_start=conversion.writer.starts_optimizer, others=others)
    if groups:
        state, derived = param_groups.regroup(state, groups)
        notes.derived += derived
    if is_live:
        state, derived = param_groups.follow_live(state, request.live_groups)
        notes.derived += derived
    if (
        conversion.writer.writes_zero(request)
        and not request.weights_only
        and not _keeps_unnamed_members(state, request, conversion.writer)
    ):
        state, derived = param_groups.drop_empty_groups(state)
        notes.derived += derived
    if is_new:
        state, derived = fresh_adam.start_adam(state, request.master_dtype)
        notes.derived += derived
    elif not request.weights_only and conversion.writer.needs_every_state(request):
        state, derived = fresh_adam.start_idle(state, request.master_dtype)
        notes.derived += derived
    if not request.weights_only:
        refuse_unwritable_hyper(state)
    save = _identify_save(state, request, conversion.writer)
    return replace(state, rng=conversion.rng, save=save)


def _keeps_unnamed_members(state: WritableState, request: Request, writer: Writer) -> bool:
    """Return whether the output keeps the groups of the source that name no parameters.

    DeepSpeed has no group without parameters. A group that names none has only parameters without
    elements, which DeepSpeed allows at the stages 0 and 3 (0.19.8 ``runtime/utils.py``,
    ``is_optimized_parameter``); at the stages 1 and 2 it fails when the engine is made.
    """
    stages = {state.manifest.origin.zero_stage, request.zero_stage}
    named = {member.fqn for member in state.members}
    return (
        stages <= {0, 3}
        and writer.numbers_parameters(request)
        and not state.regrouped
        and any(0 in weight.shape and weight.fqn not in named for weight in state.weights)
    )


def _identify_save(state: WritableState, request: Request, writer: Writer) -> Save:
    """Return the stamp of the files to write.

    The id is a digest of the source and of what is written, so that the same command writes the
    same bytes: names, sizes and stored checksums of the source's files, the tensors and the layout.
    Files without checksums (safetensors) of two runs have the same names and sizes; a sample of
    their bytes distinguishes them. For computed values, it includes how they are computed: means of
    the same files with other factors are another save.
    """
    manifest, digest = state.manifest, hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(repr(values).encode())

    add(manifest.origin.format, manifest.train.step, writer.name, *_list_layout_options(request))
    for path, file in sorted(manifest.files.items()):
        add(as_path(path).name, file.nbytes)
        for record in file.records:
            digest.update(b"%d %d " % (record.nbytes, record.crc32 or 0))
    for sample in _sample_unchecked_files(manifest):
        digest.update(sample)
    for entry in manifest.entries.values():
        add(entry.kind, entry.fqn, entry.dtype.name, entry.shape)
        if entry.chunks and isinstance(entry.chunks[0].file, Derived):
            add(entry.chunks[0].file.detail)
    for group in state.groups:
        add(sorted(group.hyper, key=str), len(group.members))
    has_step = manifest.train.step is not None or manifest.train.optimizer_step
    return Save(digest.hexdigest()[:_ID], state.step if has_step else None)


def _sample_unchecked_files(manifest: Manifest) -> Iterator[bytes]:
    """Yield blocks spread over each file that stores no checksum of its content."""
    with SourceFiles(manifest.files) as pool:
        for path, file in sorted(manifest.files.items()):
            if file.lasting and not any(record.crc32 for record in file.records):
                length = min(_SAMPLE_BYTES, file.nbytes)
                for number in range(1, _SAMPLES + 1):  # the first bytes are a header
                    start = (file.nbytes - length) * number // _SAMPLES
                    yield pool.read(path, start, length)


def _list_layout_options(request: Request) -> Iterator[object]:
    """Yield the layout options of a request as plain values."""
    for name in sorted(Request.__dataclass_fields__.keys() - _NOT_IN_ID):
        value = getattr(request, name)
        if isinstance(value, (bool, int, str, Sizes, DType, MeshGrid, type(None))):
            yield name, str(value)


def leave_out_zeros(skeleton: Skeleton, state: WritableState) -> Skeleton:
    """Return the skeleton without entries of zeros, which no source has and no window fills."""
    if not state.zero_slots:
        return skeleton
    return replace(
        skeleton, entries=tuple(e for e in skeleton.entries if e.key not in state.zero_slots)
    )
