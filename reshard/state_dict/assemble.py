"""Build a manifest from one tree of all ranks: entries, training state and warnings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers.pickles import trust
from reshard.containers.pickles.script_values import SCHEDULER
from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.core.differences import describe_first
from reshard.core.keys import strip_wrappers
from reshard.core.manifest import (
    BUFFER,
    PARAM,
    Claim,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    TrainState,
    index_entries,
)
from reshard.errors import (
    FETCH_MISSING,
    MIXED,
    CorruptError,
    IncompleteError,
    UsageError,
)
from reshard.layouts.mesh import ROLES
from reshard.model import ModelHint, ModelShapes
from reshard.model.adapter_names import find_parts, find_trained_names
from reshard.model.norm_buffers import find_norm_buffers
from reshard.quantised.scale_names import find_precision
from reshard.state_dict import flat_params, leaves, sections, shard_metadata
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.memory_form import (
    has_published_names,
    restore_adapter_form,
    restore_memory_form,
)
from reshard.state_dict.optimizers import selection, states
from reshard.state_dict.optimizers.layouts import KnownParameters
from reshard.state_dict.optimizers.states import ParsedOptimizer
from reshard.state_dict.own_values import keep_own_values
from reshard.state_dict.plain_values import to_plain
from reshard.state_dict.tree import (
    LocalTensors,
    ParsedTree,
    as_global,
    format_path,
    is_tensor,
)
from reshard.system.files import SourceFiles
from reshard.system.optional import MissingModuleError
from reshard.system.paths import as_path
from reshard.training.optimizers import SETTINGS
from reshard.units import abridge

ANOTHER = "another state dict"  # of a model that is not read, in `Manifest.unread`
# The beginning of a note, which `formats.pytorch.torchtune` takes back.
NOT_AMONG_WEIGHTS = "optimizer state of parameters that are not among the weights"
_LISTED = 6
_OPEN_END = (
    "no file states how many ranks saved: there are shards of {}, and each tensor is taken to end"
    " with the last of them; --model config.json checks the shapes"
)
_COUNTER = re.compile(r"(global_?)?steps?|iterations?|last_epoch|_step_count|epoch")

_WITH_ADAPTERS = (
    "pass a function that returns the model with all of its adapters, the untrained ones frozen:"
    " --model module:factory"
)


def build_manifest(
    parsed: ParsedTree,
    origin: Origin,
    *,
    key: str | None = None,
    model_hint: ModelHint | None = None,
    nearby: ModelHint | None = None,
    warnings: Sequence[str] = (),
) -> Manifest:
    """Build the manifest of one tree.

    Args:
        origin: where the tree comes from; its mesh and precision are filled in here.
        key: the name of the state dict that is the model; None to find it.
        nearby: the config beside the checkpoint, which is used only where the files are ambiguous.
    """
    _refuse_mixed(parsed)
    parts = sections.find(parsed.root, parsed.where, key)
    install = ""
    try:
        model, notes = _resolve_model(parts, parsed, model_hint, nearby)
    except MissingModuleError as error:
        if model_hint:
            raise
        install = error.remedy
        model, notes = None, [f"{error.where} {error.problem}"]
    state, units = _resolve_flat_params(parts, parsed, model)
    weights = _resolve_weights(state, parsed, model)
    flats = any(flat_params.parse_prefix(key) is not None for key in parts.model)
    ordered = parsed.ordered and not flats and not (units and model is None)
    # Files with an optimizer of flat units may have the weights in the order of the units.
    by_model = model is not None and (not ordered or bool(units))
    if model and by_model:
        weights = _sort_weights(weights, model)
    entries, tied = _build_weight_entries(weights)
    if model:
        tied |= {a: k for a, k in model.tied.items() if k in entries and a not in weights}
    entries, all_marked = _mark_buffers(entries, state, parts, parsed, model)
    ignored = flat_params.find_ignored(parts.model, state, model) if model else frozenset[str]()
    with SourceFiles() as pool:
        read, entries = selection.select_optimizers(
            parts,
            entries,
            KnownParameters({}, units, ignored=ignored, missing=install),
            model,
            parsed,
            pool,
            by_trainer=origin.facts.divides_by_decay,
        )
    trained = _name_as_trained(entries, read)
    entries = trained or entries
    notes += _collect_notes(parts, parsed, read, {*entries, *tied})
    all_entries = [*entries.values(), *selection.iterate_slots(read, tied)]
    train = _build_train_state(parts, read)
    models = dict.fromkeys(parts.other_models, ANOTHER)
    strays = dict.fromkeys(_find_stray_tensors(parts, train.objects), "a tensor outside the model")
    devices = (leaf.device for leaf in parts.model.values() if isinstance(leaf, GlobalTensor))
    return Manifest(
        origin=replace(
            origin,
            mesh=origin.mesh or {"world": parsed.world},
            device=next(filter(None, devices), ""),
            precision=origin.precision or find_precision(entries.values()),
        ),
        entries=index_entries(all_entries),
        files=_add_step_claims(parsed.files, read),
        train=train,
        tied=tied,
        frozen=_find_frozen(train, all_entries, entries),
        trained_dtypes={fqn: entry.dtype for fqn, entry in entries.items()},
        placements={fqn: tensor.placement for fqn, tensor in weights.items() if tensor.placement},
        may_be_ddp=not flats and _may_be_ddp(weights.values()),
        warnings=(*warnings, *parsed.notes, *notes),
        unnamed_optimizers=tuple(path for one in read for path in one.unnamed_optimizers),
        unnamed=next((one.why_unnamed for one in read if one.why_unnamed), None),
        unread={**parts.unread, **models, **strays},
        unknown_globals=trust.list_unknown(parsed.globals),
        all_buffers_marked=all_marked,
        ordered=ordered or model is not None or bool(trained),
        # An index of FSDP 1's optimizer counts in the order of its units, not in that of the model.
        keyed=None if flats or units else states.find_keying(parts.optimizers.values()),
        ordered_by_model=by_model,
    )


def _may_be_ddp(weights: Iterable[GlobalTensor]) -> bool:
    # DDP cannot wrap a model whose parameters are DTensors on an axis that shards them. DCP does
    # not store axes, and may be Megatron FSDP's, whose wrapper has the name of DDP's.
    sharded = {axis for tensor in weights for axis, dim in tensor.placement if dim is not None}
    return all(ROLES.get(axis) == "tensor" for axis in sharded)


def _name_as_trained(
    entries: Mapping[str, Entry], read: Sequence[ParsedOptimizer]
) -> dict[str, Entry]:
    # The order of PEFT's files is not the model's: they have whole trained modules after all the
    # matrices. The param groups of the optimizer list the names in the model's order. The result is
    # empty for other weights.
    trained = [fqn for one in read for group in one.groups for fqn in group.fqns]
    names = find_trained_names(entries, trained)
    position = {fqn: number for number, fqn in enumerate(trained)}
    renamed = {names[fqn]: replace(entries[fqn], fqn=names[fqn]) for fqn in names}
    others = {fqn: entry for fqn, entry in entries.items() if fqn not in names}
    by_position = sorted(renamed, key=position.__getitem__)
    return {**{fqn: renamed[fqn] for fqn in by_position}, **others} if names else {}


def _add_step_claims(
    files: Mapping[str, SourceFile], read: Sequence[ParsedOptimizer]
) -> dict[str, SourceFile]:
    # DCP stores the counter of each parameter in the file of one rank. A file whose counters all
    # agree states a step; one counter alone says nothing, because a parameter may be trained less
    # often than the others.
    counted: dict[str, list[float]] = defaultdict(list)
    for one in read:
        for fqn, path in one.step_files.items():
            counted[path].append(one.steps[fqn])
    result = dict(files)
    for path, steps in counted.items():
        if len(steps) > 1 and len(set(steps)) == 1:
            claim = Claim("optimizer step", f"{steps[0]:g}", "the step counter of its parameters")
            result[path] = replace(result[path], claims=(*result[path].claims, claim))
    return result


def _build_train_state(parts: sections.Sections, read: Sequence[ParsedOptimizer]) -> TrainState:
    steps = {fqn: step for one in read for fqn, step in one.steps.items()}
    other = {fqn: value for one in read for fqn, value in one.non_tensor_state.items()}
    step, opaque = _resolve_step(parts, steps)
    own = {**parts.client, SCHEDULER: parts.scheduler}
    return TrainState(
        step=step,
        samples=parts.samples,
        skipped_steps=parts.skipped_steps,
        optimizer_step=steps,
        non_tensor_state=other,
        param_groups=tuple(group for one in read for group in one.groups),
        scheduler=to_plain(parts.scheduler),
        scaler=to_plain(parts.scaler),
        rng=to_plain(parts.rng),
        client={name: to_plain(value) for name, value in parts.client.items()},
        objects=keep_own_values(own, own),
        opaque=opaque,
        keys=parts.keys,
    )


def _find_frozen(
    train: TrainState, entries: Iterable[Entry], weights: Mapping[str, Entry]
) -> frozenset[str]:
    stated = {entry.fqn for entry in entries if entry.kind not in (PARAM, BUFFER)}
    idle = train.group_of.keys() - stated - train.non_tensor_state.keys()
    unstated = (fqn for fqn in idle if fqn in weights and weights[fqn].kind == PARAM)
    # An optimizer without any state has not made a step yet: then nothing shows what is frozen.
    return frozenset(unstated) if stated else frozenset()


def _resolve_step(
    parts: sections.Sections, steps: Mapping[str, float]
) -> tuple[int | None, dict[str, Any]]:
    if parts.accumulated is None:
        return parts.step, {}
    # Accelerate counts micro batches of one epoch; the optimizer's own count gives the updates.
    step = parts.step
    if step is None and steps:
        step = int(max(steps.values()))
    return step, {} if parts.accumulated == step else {sections.ACCUMULATED: parts.accumulated}


def _refuse_mixed(parsed: ParsedTree) -> None:
    for path, (value, file, first, there) in parsed.differing.items():
        if not path:
            raise CorruptError(file, f"has other contents than {as_path(there).name}", MIXED)
        is_counter = _COUNTER.fullmatch(str(path[-1])) is not None
        is_random = any(sections.RNG.search(str(part)) for part in path)
        if (is_counter and not is_random) or _is_setting(path):
            what, name = repr(format_path(path)), as_path(there).name
            raise CorruptError(file, describe_first(what, value, first, name), MIXED)


def _is_setting(path: Sequence[Any]) -> bool:
    # Other numbers may be those that a rank's optimizer computes from its own part.
    names = [name for part in path for name in str(part).split(".")]
    return "param_groups" in names and not SETTINGS.isdisjoint(names)


def _resolve_model(
    parts: sections.Sections,
    parsed: ParsedTree,
    model_hint: ModelHint | None,
    nearby: ModelHint | None,
) -> tuple[ModelShapes | None, list[str]]:
    # Weights in the model's published form (HF Trainer's) are brought into the form in memory, to
    # which names and numbers in the optimizer refer.
    optimized = _collect_optimized(parts)
    prefixes = [
        prefix for key in parts.model if (prefix := flat_params.parse_prefix(key)) is not None
    ]
    if model_hint:
        model = model_hint.shapes(prefixes)
        if has_published_names(optimized, model):
            return None, []  # optimizer and weights together are brought into the form in memory
        parts.model, model = _restore_form(parts.model, model, parsed, optimized)
        mismatch = _describe_mismatch(model, parts.model)
        # Flat parameters hide the names: `flat_params.build_unit` checks their sizes instead.
        if mismatch and not prefixes:
            raise UsageError(
                f"--model {model_hint.model}",
                f"is not the model of the checkpoint: {mismatch}",
                _WITH_ADAPTERS if find_parts(parts.model) else "",
            )
        return model, []
    numbered = any(map(states.is_numbered, parts.optimizers.values()))
    named = any(map(states.collect_shapes, parts.optimizers.values()))
    unordered = numbered and not parsed.ordered
    open_end = [] if parsed.proved else [_OPEN_END.format(parsed.world)]
    wrapped = nearby and (nearby.wrap or (nearby.by_blocks and numbered))
    is_live = nearby and nearby.known is not None
    needed = wrapped or unordered or open_end or (prefixes and not named) or (numbered and is_live)
    if nearby is None or not needed or (is_live and prefixes):
        return None, open_end
    try:
        model = nearby.shapes(prefixes)
    except MissingModuleError:
        raise
    except UsageError as error:
        return None, [*open_end, f"{nearby.model}: {error.problem}"]
    parts.model, model = _restore_form(parts.model, model, parsed, optimized)
    mismatch = _describe_mismatch(model, parts.model)
    if mismatch and not prefixes:
        if open_end:
            raise IncompleteError(
                parsed.where,
                f"the shards of {parsed.world} ranks do not form the model of {nearby.model}:"
                f" {mismatch}",
                FETCH_MISSING,
            )
        return None, [f"{nearby.model} describes another model: {mismatch}"]
    return model, [_describe_nearby(nearby.model, numbered=numbered, is_live=bool(is_live))]


def _describe_nearby(model: str, *, numbered: bool, is_live: bool) -> str:
    text = f"names and order of parameters are taken from {model}"
    if numbered:
        text += ", because the optimizer counts its parameters"
    if not is_live:
        text += "; if the run trained another model, pass --model"
    return text


def _collect_optimized(parts: sections.Sections) -> set[str]:
    return set[str]().union(*map(states.collect_names, parts.optimizers.values()))


def _restore_form(
    state: Mapping[str, Any], model: ModelShapes, parsed: ParsedTree, optimized: set[str]
) -> tuple[dict[str, Any], ModelShapes]:
    model = _name_as_wrapped(model, state)
    state = restore_memory_form(state, model)
    return restore_adapter_form(state, model, parsed.saved_modules, optimized)


def _name_as_wrapped(model: ModelShapes, state: Mapping[str, Any]) -> ModelShapes:
    # The state dict of a wrapped model has prefixes in its names, those of DDP (``module.``) and
    # ``torch.compile`` (``_orig_mod.``) among them.
    wrapped = {bare: fqn for fqn, bare in strip_wrappers(state).items() if bare != fqn}
    if not wrapped:
        return model
    # Names that the state dict lacks, such as members of flat parameters, have what all have.
    before = {fqn.removesuffix(bare) if fqn.endswith(bare) else "" for bare, fqn in wrapped.items()}
    common = before.pop() if len(wrapped) == len(state) and len(before) == 1 else ""
    return model.rename(lambda fqn: fqn if fqn in state else wrapped.get(fqn, common + fqn))


def _describe_mismatch(model: ModelShapes, state: Mapping[str, Any]) -> str:
    tensors = {fqn: as_global(leaf) for fqn, leaf in state.items()}
    for fqn, shape in model.parameters.items():
        names = [fqn, *(alias for alias, kept in model.tied.items() if kept == fqn)]
        tensor = next((tensors[name] for name in names if name in tensors), None)
        if not any(name in tensors for name in names):
            return f"the checkpoint has no {fqn!r}"
        if tensor and tensor.shape != shape:
            return f"{fqn!r} is {tensor.shape} in the checkpoint, {shape} in the model"
    extra = tensors.keys() - model.parameters.keys() - model.buffers.keys() - model.tied.keys()
    return f"the model has no {min(extra)!r}" if extra else ""


def _resolve_flat_params(
    parts: sections.Sections, parsed: ParsedTree, model: ModelShapes | None
) -> tuple[dict[str, Any], list[flat_params.FlatUnit]]:
    beside = format_path((*parts.model_path[:-1], shard_metadata.KEY))
    if beside in parts.client:
        about = parts.client[beside]
        # HF Trainer saves another copy beside the optimizer.
        copies = {path for path in parts.client if path.endswith(f".{shard_metadata.KEY}")}
        for path in {beside, *copies}:
            del parts.client[path]
        return shard_metadata.resolve(parts.model, about, parsed.where)
    if any(flat_params.parse_prefix(key) is not None for key in parts.model):
        shapes: dict[str, Index] = {}
        for value in parts.optimizers.values():
            shapes.update(states.collect_shapes(value))
        return flat_params.resolve(parts.model, where=parsed.where, model=model, shapes=shapes)
    if model is None:
        return parts.model, []
    ignored = flat_params.find_ignored(parts.model, parts.model, model)
    return parts.model, flat_params.build_units(model, ignored)


def _sort_weights(
    weights: Mapping[str, GlobalTensor], model: ModelShapes
) -> dict[str, GlobalTensor]:
    # Weights that are not parameters, such as buffers, come at the end, or stay in their places if
    # the order is right already.
    position = {fqn: index for index, fqn in enumerate(model.parameters)}
    found = [position[fqn] for fqn in weights if fqn in position]
    if found == sorted(found):
        return dict(weights)
    return dict(sorted(weights.items(), key=lambda item: position.get(item[0], len(position))))


def _resolve_weights(
    state: Mapping[str, Any], parsed: ParsedTree, model: ModelShapes | None
) -> dict[str, GlobalTensor]:
    weights = {}
    for fqn, leaf in state.items():
        tensor = as_global(leaf)
        shape = model.parameters.get(fqn) if model else None
        if tensor is None and shape is not None:
            tensor = flat_params.join_slices(parsed.where, fqn, shape, list(leaf.pieces.values()))
        if tensor is None:
            raise CorruptError(
                next(iter(leaf.pieces.values())).file,
                f"{fqn!r} has different shapes on different ranks ({sorted(leaf.shapes())}), and no"
                " file states how they fit together",
                "if they are parts of one tensor, state the cut with --rules FILE; else the files"
                " belong to different runs",
            )
        weights[fqn] = tensor
    return weights


def _build_weight_entries(
    weights: Mapping[str, GlobalTensor],
) -> tuple[dict[str, Entry], dict[str, str]]:
    first: dict[tuple[Chunk, ...], str] = {}
    tied: dict[str, str] = {}
    entries = {}
    for fqn, tensor in weights.items():
        stored = tuple(chunk for chunk in tensor.chunks if chunk.box.volume)
        # Weights without elements have no bytes that could show a tie.
        kept = first.setdefault(stored, fqn) if stored else fqn
        if kept != fqn:
            tied[fqn] = kept
        else:
            entries[fqn] = tensor.make_entry(fqn, PARAM)
    return entries, tied


def _mark_buffers(
    entries: Mapping[str, Entry],
    state: Mapping[str, Any],
    parts: sections.Sections,
    parsed: ParsedTree,
    model: ModelShapes | None,
) -> tuple[dict[str, Entry], bool]:
    if model is not None:
        buffers, all_marked = set(model.buffers), True
    else:
        # A plain tensor beside sharded ones is a buffer, unless an optimizer trains it.
        is_local = {fqn: isinstance(state.get(fqn), LocalTensors) for fqn in entries}
        all_marked = parsed.plain_is_buffer and len(set(is_local.values())) > 1
        buffers = {fqn for fqn, local in is_local.items() if all_marked and local}
        buffers = (buffers | find_norm_buffers(entries)) - _collect_optimized(parts)
    marked = {
        fqn: replace(entry, kind=BUFFER) if fqn in buffers else entry
        for fqn, entry in entries.items()
    }
    return marked, all_marked


def _find_stray_tensors(parts: sections.Sections, kept: Container[str] = ()) -> list[str]:
    # ``kept``: names of values that a target can write again, tensors included.
    return [
        name
        for path, value in parts.client.items()
        if not sections.RNG.search(path) and path not in kept
        for name in ([path] if is_tensor(value) else leaves.find_weights(value, path))
    ]


def _collect_notes(
    parts: sections.Sections, parsed: ParsedTree, read: Iterable[ParsedOptimizer], names: set[str]
) -> Iterable[str]:
    for one in read:
        yield from one.notes
    unknown = sorted({entry.fqn for one in read for entry in one.entries} - names)
    if unknown:
        shown = abridge(unknown, _LISTED)
        held = any(entry.fqn in names for one in read for entry in one.entries)
        why = "" if held else f" (the weights have other names: {abridge(sorted(names), 2)})"
        yield f"{NOT_AMONG_WEIGHTS}: {shown}{why}"
    if parts.other_models:
        shown = abridge([*parts.other_models], _LISTED)
        yield f"the checkpoint has other state dicts, which --key NAME selects: {shown}"
    strays = _find_stray_tensors(parts)
    if strays:
        yield f"tensors outside the model, which merge leaves out: {abridge(strays, _LISTED)}"
    rng = sections.RNG
    differing = [
        path
        for path in parsed.differing
        if not any(rng.search(str(part)) or part == shard_metadata.KEY for part in path)
    ]
    if differing:
        shown = abridge([format_path(path) for path in differing], _LISTED)
        yield f"the ranks saved different values of {shown}: the first rank's are used"
