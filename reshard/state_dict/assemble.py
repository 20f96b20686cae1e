"""From one tree of all ranks to a manifest: entries, train state, and what is to be said."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.box import Index
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from reshard.files import SourceFiles
from reshard.manifest import (
    BUFFER,
    PARAM,
    Chunk,
    Claim,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    TrainState,
    index_entries,
    most_common_dtype,
)
from reshard.model import ModelHint, ModelShapes
from reshard.pickles import objects, trust
from reshard.state_dict import (
    flat_params,
    leaves,
    model_optimizers,
    optimizer_state,
    sections,
    tree,
)
from reshard.state_dict.optimizer_state import ParsedOptimizer
from reshard.state_dict.plain_values import to_plain
from reshard.state_dict.tree import (
    GlobalTensor,
    LocalTensors,
    ParsedTree,
    as_global,
    format_path,
    is_tensor,
)

_LISTED = 6
_FAIRSCALE = "shard_metadata"
_OPEN_END = (
    "no file says how many ranks saved: there are shards of {}, and tensors are as large as these"
    " make them; --model config.json has the shapes checked"
)
_COUNTER = re.compile(r"(global_?)?steps?|iterations?|last_epoch|_step_count|epoch")


def build_manifest(
    found: ParsedTree,
    origin: Origin,
    *,
    key: str | None = None,
    model_hint: ModelHint | None = None,
    nearby: ModelHint | None = None,
    warnings: Sequence[str] = (),
) -> Manifest:
    """The manifest of one tree.

    Args:
        origin: its mesh and precision are filled in here.
        key: which state dict is the model.
        model_hint: what the user states about the model.
        nearby: what a config beside the checkpoint says, for what the files leave open.

    Raises:
        ReshardError: no model in it, or one that is stored in a way that nothing explains.
    """
    _refuse_mixed(found)
    split = sections.find(found.root, found.where, key)
    model, notes = _resolve_model(split, found, model_hint, nearby)
    state, units = _resolve_flat_params(split, found, model)
    weights = _resolve_weights(state, found, model)
    flats = any(flat_params.parse_prefix(key) is not None for key in split.model)
    ordered = found.ordered and not flats and not (units and model is None)
    if model and not ordered:
        place = {fqn: index for index, fqn in enumerate(model.parameters)}
        weights = dict(sorted(weights.items(), key=lambda item: place.get(item[0], len(place))))
    first, tied = _build_weight_entries(weights)
    if model:
        tied |= {a: k for a, k in model.tied.items() if k in first and a not in weights}
    first = _mark_buffers(first, state, split, found, model)
    with SourceFiles() as pool:
        read, first = model_optimizers.select_optimizers(split, first, units, model, found, pool)
    said = [*warnings, *found.notes, *notes, *_collect_notes(split, found, read, {*first, *tied})]
    entries = [*first.values(), *model_optimizers.iterate_slots(read, tied)]
    train = _build_train_state(split, read)
    return Manifest(
        origin=replace(
            origin,
            mesh=origin.mesh or {"world": found.world},
            precision=origin.precision or most_common_dtype(e.dtype for e in first.values()),
        ),
        entries=index_entries(entries),
        files=_add_step_claims(found.files, read),
        train=train,
        tied=tied,
        frozen=_find_frozen(train, entries, first),
        trained_dtypes={fqn: entry.dtype for fqn, entry in first.items()},
        warnings=tuple(said),
        unnamed_optimizers=tuple(path for one in read for path in one.unnamed_optimizers),
        unread=_describe_unread(split),
        unknown_globals=trust.unknown(found.globals),
        ordered=ordered or model is not None,
        keyed=None if flats or units else optimizer_state.find_keying(split.optimizers.values()),
        ordered_by_model=model is not None and not ordered,  # sorted by it above
    )


def _add_step_claims(
    files: Mapping[str, SourceFile], read: Sequence[ParsedOptimizer]
) -> dict[str, SourceFile]:
    """Add the claim about the optimizer step that each file makes by its step counters.

    DCP stores the counter of each parameter in the file of one rank. A file whose counters all
    agree states a step; one counter alone says nothing, because a parameter may be trained less
    often than the others.
    """
    counted: dict[str, list[float]] = defaultdict(list)
    for one in read:
        for fqn, path in one.step_files.items():
            counted[path].append(one.steps[fqn])
    made = dict(files)
    for path, steps in counted.items():
        if len(steps) > 1 and len(set(steps)) == 1:
            claim = Claim("optimizer step", f"{steps[0]:g}", "the step counter of its parameters")
            made[path] = replace(made[path], claims=(*made[path].claims, claim))
    return made


def _build_train_state(split: sections.Sections, read: Sequence[ParsedOptimizer]) -> TrainState:
    """Everything that is no tensor of the model's or of an optimizer's."""
    steps = {fqn: step for one in read for fqn, step in one.steps.items()}
    other = {fqn: value for one in read for fqn, value in one.other.items()}
    step, opaque = _resolve_step(split, steps)
    return TrainState(
        step=step,
        samples=split.samples,
        skipped_steps=split.skipped_steps,
        optimizer_step=steps,
        non_tensor_state=other,
        param_groups=tuple(group for one in read for group in one.groups),
        scheduler=to_plain(split.scheduler),
        scaler=to_plain(split.scaler),
        rng=to_plain(split.rng),
        client={name: to_plain(value) for name, value in split.client.items()},
        objects=objects.kept(split.client, split.client),
        opaque=opaque,
    )


def _find_frozen(
    train: TrainState, entries: Iterable[Entry], weights: Mapping[str, Entry]
) -> frozenset[str]:
    """Parameters of param groups without a state, where others have one."""
    stated = {entry.fqn for entry in entries if entry.kind not in (PARAM, BUFFER)}
    named = {fqn for group in train.param_groups for fqn in group.fqns}
    idle = named - stated - train.opaque.get("optimizer", {}).keys()
    unstated = (fqn for fqn in idle if fqn in weights and weights[fqn].kind == PARAM)
    return frozenset(unstated) if stated else frozenset()


def _resolve_step(
    split: sections.Sections, steps: Mapping[str, float]
) -> tuple[int | None, dict[str, Any]]:
    """The run's step; beside it what Accelerate counted, where that is something else."""
    if split.accumulated is None:
        return split.step, {}
    updates = int(max(steps.values(), default=split.accumulated))
    step = updates if split.step is None else split.step
    return step, {} if split.accumulated == step else {sections.ACCUMULATED: split.accumulated}


def _refuse_mixed(found: ParsedTree) -> None:
    """Ranks that counted other steps did not save together.

    Raises:
        CorruptError: naming the counter; or the files have nothing in common.
    """
    for path in found.differing:
        if not path:
            raise CorruptError(found.where, "the ranks' files hold different things", tree.MIXED)
        if _COUNTER.fullmatch(str(path[-1])) and not any(sections.RNG.search(str(p)) for p in path):
            raise CorruptError(
                found.where, f"the ranks' files disagree on {format_path(path)!r}", tree.MIXED
            )


def _resolve_model(
    split: sections.Sections,
    found: ParsedTree,
    model_hint: ModelHint | None,
    nearby: ModelHint | None,
) -> tuple[ModelShapes | None, list[str]]:
    """The model that the user named, or the one beside where the files leave something open.

    Raises:
        UsageError: the user named another model than the checkpoint's.
    """
    prefixes = [
        prefix for key in split.model if (prefix := flat_params.parse_prefix(key)) is not None
    ]
    if model_hint:
        model = model_hint.shapes(prefixes)
        foreign = _describe_mismatch(model, split.model)
        if foreign and not prefixes:
            raise UsageError(
                f"--model {model_hint.model}", f"is another model than the checkpoint's: {foreign}"
            )
        return model, []
    numbered = any(map(optimizer_state.is_numbered, split.optimizers.values()))
    named = any(map(optimizer_state.collect_shapes, split.optimizers.values()))
    unordered = numbered and not found.ordered
    open_end = [] if found.proved else [_OPEN_END.format(found.world)]
    wrapped = nearby and (nearby.wrap or (nearby.by_blocks and numbered))
    needed = wrapped or unordered or open_end or (prefixes and not named)
    if nearby is None or not needed:
        return None, open_end
    try:
        model = nearby.shapes(prefixes)
    except (UsageError, UnsupportedError) as error:
        return None, [f"{nearby.model} does not help: {error.problem}"]
    foreign = _describe_mismatch(model, split.model)
    if foreign and not prefixes:
        if open_end:
            raise IncompleteError(
                found.where,
                f"{found.world} ranks' shards do not make the model of {nearby.model}: {foreign}",
                "copy the missing shards here (a node-local disk may still hold them)",
            )
        return None, [f"{nearby.model} describes another model: {foreign}"]
    return model, [f"the parameters' names and order are those of {nearby.model}"]


def _describe_mismatch(model: ModelShapes, state: Mapping[str, Any]) -> str:
    """What a model and a state dict do not have in common; empty where they fit."""
    held = {fqn: as_global(leaf) for fqn, leaf in state.items()}
    for fqn, shape in model.parameters.items():
        names = [fqn, *(alias for alias, kept in model.tied.items() if kept == fqn)]
        found = next((held[name] for name in names if name in held), None)
        if not any(name in held for name in names):
            return f"the checkpoint has no {fqn!r}"
        if found and found.shape != shape:
            return f"{fqn!r} is {found.shape} in the checkpoint, {shape} in the model"
    extra = held.keys() - model.parameters.keys() - model.buffers.keys() - model.tied.keys()
    return f"the model has no {min(extra)!r}" if extra else ""


def _resolve_flat_params(
    split: sections.Sections, found: ParsedTree, model: ModelShapes | None
) -> tuple[dict[str, Any], list[flat_params.FlatUnit]]:
    """The model's state dict without flat parameters, and the units that it had."""
    beside = format_path((*split.model_path[:-1], _FAIRSCALE))
    if beside in split.client:
        about = split.client.pop(beside)
        return _resolve_fairscale(split.model, about, found.where)
    if any(flat_params.parse_prefix(key) is not None for key in split.model):
        shapes: dict[str, Index] = {}
        for value in split.optimizers.values():
            shapes.update(optimizer_state.collect_shapes(value))
        return flat_params.resolve(split.model, where=found.where, model=model, shapes=shapes)
    return split.model, flat_params.build_units(model) if model else []


def _resolve_fairscale(
    state: Mapping[str, Any], about: Any, where: str
) -> tuple[dict[str, Any], list[flat_params.FlatUnit]]:
    named = flat_params.read_fairscale_units(about, where)
    units = {key: named[key] for key in state if key in named}  # in the optimizer's order
    tensors: dict[str, Any] = {}
    for key, value in state.items():
        unit = units.get(key)
        if unit is None:
            tensors[key] = value
            continue
        if not isinstance(value, LocalTensors):
            raise CorruptError(where, f"{key!r} is no flat parameter, as shard_metadata says it is")
        pieces = [value.pieces[rank] for rank in sorted(value.pieces)]
        tensors.update(unit.tensors(flat_params.locate_pieces(pieces, unit.numel)))
    return tensors, list(units.values())


def _resolve_weights(
    state: Mapping[str, Any], found: ParsedTree, model: ModelShapes | None
) -> dict[str, GlobalTensor]:
    """Every tensor of the model's state dict with its global shape."""
    weights = {}
    for fqn, leaf in state.items():
        tensor = as_global(leaf)
        wanted = model.parameters.get(fqn) if model else None
        if tensor is None and wanted is not None:
            tensor = flat_params.join_slices(found.where, fqn, wanted, list(leaf.pieces.values()))
        if tensor is None:
            raise CorruptError(
                next(iter(leaf.pieces.values())).file,
                f"{fqn!r} has other shapes on other ranks ({sorted(leaf.shapes())}), and nothing"
                " says how they belong together",
                "the files are of model-parallel ranks, or of different runs",
            )
        weights[fqn] = tensor
    return weights


def _build_weight_entries(
    weights: Mapping[str, GlobalTensor],
) -> tuple[dict[str, Entry], dict[str, str]]:
    """One entry a weight; names of the same bytes are aliases of the first."""
    first: dict[tuple[Chunk, ...], str] = {}
    tied: dict[str, str] = {}
    entries = {}
    for fqn, tensor in weights.items():
        held = tuple(chunk for chunk in tensor.chunks if chunk.box.volume)
        kept = first.setdefault(held, fqn) if held else fqn
        if kept != fqn:
            tied[fqn] = kept
        else:
            entries[fqn] = Entry(fqn, PARAM, tensor.dtype, tensor.shape, tensor.chunks)
    return entries, tied


def _mark_buffers(
    entries: Mapping[str, Entry],
    state: Mapping[str, Any],
    split: sections.Sections,
    found: ParsedTree,
    model: ModelShapes | None,
) -> dict[str, Entry]:
    """Buffers told from parameters, where anything tells."""
    if model is not None:
        buffers = set(model.buffers)
    else:
        trained: set[str] = set()
        for value in split.optimizers.values():
            trained |= optimizer_state.collect_names(value)
        is_local = {fqn: isinstance(state.get(fqn), LocalTensors) for fqn in entries}
        mixed = found.plain_is_buffer and len(set(is_local.values())) > 1
        buffers = {fqn for fqn, local in is_local.items() if mixed and local} - trained
    return {
        fqn: replace(entry, kind=BUFFER) if fqn in buffers else entry
        for fqn, entry in entries.items()
    }


def _find_stray_tensors(split: sections.Sections) -> list[str]:
    """Tensors outside of every model and optimizer, but for the states of generators."""
    return [
        name
        for path, value in split.client.items()
        if not sections.RNG.search(path)
        for name in ([path] if is_tensor(value) else leaves.find_weights(value, path))
    ]


def _describe_unread(split: sections.Sections) -> dict[str, str]:
    """Name -> what it is, of each value that is neither weight nor optimizer nor train state."""
    models = dict.fromkeys(split.other_models, "another state dict")
    return {
        **split.unread,
        **models,
        **dict.fromkeys(_find_stray_tensors(split), "a tensor of no model"),
    }


def _collect_notes(
    split: sections.Sections, found: ParsedTree, read: Iterable[ParsedOptimizer], names: set[str]
) -> Iterable[str]:
    for one in read:
        yield from one.notes
    strange = sorted({entry.fqn for one in read for entry in one.entries} - names)
    if strange:
        yield f"optimizer state of what is no weight here: {', '.join(strange[:_LISTED])}"
    if split.other_models:
        shown = ", ".join(split.other_models[:_LISTED])
        yield f"other state dicts are in it, which --key NAME chooses: {shown}"
    beside = _find_stray_tensors(split)
    if beside:
        yield f"tensors that belong to no model are left out: {', '.join(beside[:_LISTED])}"
    quiet = sections.RNG
    differing = [
        path
        for path in found.differing
        if not any(quiet.search(str(part)) or part == _FAIRSCALE for part in path)
    ]
    if differing:
        shown = ", ".join(format_path(path) for path in differing[:_LISTED])
        yield f"the ranks saved different values of {shown}: the first rank's are taken"
