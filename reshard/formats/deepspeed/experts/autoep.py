"""Read runs with AutoEP, which replaces a transformers model's layers of experts.

The state has the names of the model that the program built: ``experts.gate_up_proj`` instead of
AutoEP's ``w1`` and ``w3``, ``experts.down_proj`` instead of ``w2``, ``gate`` instead of
``router.gate``. An expert-parallel rank has the experts ``[rank * local, (rank + 1) * local)`` of
each layer; the ranks that share them divide their optimizer state. Source: DeepSpeed 0.19.8
``module_inject/auto_ep_layer.py``, ``moe/ep_repack.py``, ``runtime/engine.py``
(``_save_moe_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core import counts
from reshard.core.box import Box, Index
from reshard.core.chunks import Chunk
from reshard.core.manifest import PARAM, Entry, Key, Manifest, ParamGroup, index_entries
from reshard.core.renames import check_parts_dtype, replace_tensors
from reshard.core.schema import COUNT, TEXT, expect, fields, record, sequence
from reshard.core.views import Put, Reshape, apply_views
from reshard.errors import FETCH_MISSING, MIXED, CorruptError, IncompleteError, UnsupportedError
from reshard.formats.deepspeed import tag_directory
from reshard.formats.deepspeed.directory import TagFiles
from reshard.formats.deepspeed.experts.layout import has_experts
from reshard.formats.deepspeed.states import ModelStates, make_whole_entry
from reshard.system.threads import map_files_by_key

_PARTS = ("w1", "w2", "w3")
_OWN_NAMES = (  # settings that replace the names of DeepSpeed's presets
    *("moe_layer_pattern", "expert_pattern", "router_pattern", "shared_experts_pattern"),
    *("shared_experts_gate_pattern", "expert_w1", "expert_w2", "expert_w3"),
)
_LAYERS = sequence(
    record(
        moe_layer_id=COUNT,
        module_path=TEXT,
        num_experts=COUNT,
        num_local_experts=COUNT,
        ep_size=COUNT,
    )
)
_PLACEMENTS = sequence(  # not in its first versions
    fields(
        expert_placement=record(ranks=sequence(record(rank=COUNT, experts=sequence(COUNT)))),
    )
)
_WITHOUT_AUTOEP = (
    "trained with AutoEP: the names are those of the model without it. A DeepSpeed run that goes on"
    " from the output must not enable expert_parallel"
)


@dataclass(frozen=True, slots=True)
class _ExpertLayer:
    number: int
    path: str  # of the module that AutoEP replaced
    experts: int
    per_rank: int  # number of experts of one rank

    def name_weight(self, part: str) -> str:
        return f"{self.path}.experts.{part}"

    def name_rank_weight(self, part: str, rank: int) -> str:
        """Return a name for the experts of one expert-parallel rank; see `layout.FIRST_RANK`."""
        return f"{self.name_weight(part)}@{rank}"


@dataclass(frozen=True, slots=True)
class _ModelPlace:
    """The position of a part of the state in a tensor of the model that the program built."""

    fqn: str
    shape: Index
    box: Box

    def put(self, entry: Entry) -> Iterator[Chunk]:
        views = (Reshape(entry.shape, self.box.shape), Put(self.shape, self.box))
        return apply_views(entry.chunks, views)


def uses_autoep(first: ModelStates) -> bool:
    """Return whether AutoEP replaced layers of the model."""
    return bool(first.root.get("ds_autoep_layers"))


def read(files: TagFiles, first: ModelStates) -> Manifest:
    """Describe the training state under the names of the model that the program built.

    Raises:
        IncompleteError: an expert's or a rank's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: tensor-parallel ranks too, a run without ZeRO, experts that several ranks
            hold, or names that are not those of DeepSpeed's presets.
    """
    _refuse(files, first)
    layers, size = _read_layers(first)
    opened = _open_experts(files, first, layers)
    first = drop_aliases(first)
    manifest = tag_directory.read(
        files.ranks[0], _with_all_ranks(first, layers, size), list(opened.values())
    )
    entries = [*manifest.entries.values(), *_read_weights(opened)]
    return _restore(manifest, entries, first)


def restore_names(manifest: Manifest, first: ModelStates) -> Manifest:
    """Return a universal checkpoint, which has whole weights, under the model's names.

    That of a run without AutoEP has them.

    Args:
        first: its model states, without aliases.
    """
    if not uses_autoep(first):
        return manifest
    _refuse_own_names(first)
    return _restore(manifest, manifest.entries.values(), first)


def _restore(manifest: Manifest, entries: Iterable[Entry], first: ModelStates) -> Manifest:
    layers, size = _read_layers(first)
    places, names = _place_experts(first, layers, size), _rename_others(first, layers)
    moved = index_entries(_join(manifest.origin.path, entries, places, names))

    def list_new_names(fqn: str) -> tuple[str, ...]:
        return (places[fqn].fqn if fqn in places else names.get(fqn, fqn),)

    copies = [replace(copy, fqn=names.get(copy.fqn, copy.fqn)) for copy in manifest.tied_copies]
    manifest = replace_tensors(manifest, moved, copies, list_new_names)
    saved = {entry.fqn: entry.dtype for entry in moved.values() if entry.kind == PARAM}
    train = replace(manifest.train, param_groups=_join_groups(manifest.train.param_groups))
    return replace(
        manifest,
        # The mesh gets no "ep": writers take it for experts of DeepSpeed's own MoE layers.
        origin=replace(manifest.origin, detail=f"{manifest.origin.detail}, AutoEP of {size} ranks"),
        trained_dtypes={**saved, **manifest.trained_dtypes},
        train=train,
        warnings=(*manifest.warnings, _WITHOUT_AUTOEP),
    )


def _refuse(files: TagFiles, first: ModelStates) -> None:
    where = files.location
    if files.layers or set(files.ranks) != {0}:
        raise UnsupportedError(
            where,
            "contains experts of AutoEP in a tensor-parallel run, which reshard does not read yet",
        )
    if not files.ranks[0].optim:
        raise UnsupportedError(
            where,
            "contains experts of AutoEP without ZeRO optimizer states, which reshard does not read",
            "copy the zero_pp_rank_* optimizer states here if the run used ZeRO",
        )
    _refuse_own_names(first)


def _refuse_own_names(first: ModelStates) -> None:
    section = first.config.get("expert_parallel")
    settings = section if isinstance(section, dict) else {}
    own = [name for name in _OWN_NAMES if settings.get(name) is not None]
    if own:
        raise UnsupportedError(
            first.file.path,
            f"contains experts of AutoEP, trained with a setting for names ({own[0]});"
            " reshard knows only the names of DeepSpeed's presets",
        )


def _read_layers(first: ModelStates) -> tuple[list[_ExpertLayer], int]:
    listed = first.root["ds_autoep_layers"]
    path = first.file.path
    for kind in (_LAYERS, _PLACEMENTS):
        expect(path, listed, kind, "ds_autoep_layers")
    layers = []
    for entry in listed:
        size, local = entry["ep_size"], entry["num_local_experts"]
        count = counts.check_count(path, "num_experts", entry["num_experts"])
        if size != listed[0]["ep_size"] or size * local != count:
            raise CorruptError(
                path,
                f"lists {count} experts of {entry['module_path']!r} on {size} ranks with"
                f" {local} each",
                MIXED,
            )
        placement = entry.get("expert_placement", {"ranks": ()})["ranks"]
        if any(
            holder["experts"] != list(range(holder["rank"] * local, (holder["rank"] + 1) * local))
            for holder in placement
        ):
            raise UnsupportedError(
                path,
                f"places the experts of {entry['module_path']!r} on ranks in another order than"
                " DeepSpeed 0.19 does, which reshard does not read",
            )
        layers.append(_ExpertLayer(entry["moe_layer_id"], entry["module_path"], count, local))
    return layers, listed[0]["ep_size"]


def _open_experts(
    files: TagFiles, first: ModelStates, layers: Sequence[_ExpertLayer]
) -> dict[tuple[int, int], TorchFile]:
    """Open the file of each expert; stage 3 writes none."""
    if files.ranks[0].model_is_sharded:
        return {}
    paths = {}
    for layer in layers:
        for number in range(layer.experts):
            path = files.experts.get((layer.number, number), {}).get(0)
            if path is None:
                raise IncompleteError(
                    first.file.path,
                    f"lists {layer.experts} experts of {layer.path!r}, but"
                    f" layer_{layer.number}_expert_{number}_mp_rank_00_model_states.pt is missing",
                    FETCH_MISSING,
                )
            paths[layer.number, number] = path
    return map_files_by_key(paths, torch_reader.read)


def _place_experts(
    first: ModelStates, layers: Sequence[_ExpertLayer], size: int
) -> dict[str, _ModelPlace]:
    # ``gate_up_proj`` has the rows of ``w1`` and then those of ``w3``.
    shapes = {name: shape for group in first.shapes for name, shape in group.items()}
    places = {}
    for layer in layers:
        for part in _PARTS:
            shape = shapes.get(layer.name_weight(part))
            if shape is None or len(shape) != 3 or shape[0] != layer.per_rank:
                raise CorruptError(
                    first.file.path,
                    f"lists {layer.name_weight(part)!r} with shape {shape}; the weights of"
                    f" {layer.per_rank} experts are expected",
                    MIXED,
                )
            _, rows, columns = shape
            fqn = f"{layer.path}.experts." + ("down_proj" if part == "w2" else "gate_up_proj")
            total = (layer.experts, rows if part == "w2" else 2 * rows, columns)
            at = rows if part == "w3" else 0
            for rank in range(size):
                box = Box((rank * layer.per_rank, at, 0), (layer.per_rank, rows, columns))
                places[layer.name_rank_weight(part, rank)] = _ModelPlace(fqn, total, box)
            box = Box((0, at, 0), (layer.experts, rows, columns))
            places[layer.name_weight(part)] = _ModelPlace(fqn, total, box)
            for number in range(layer.experts):
                box = Box((number, at, 0), (1, rows, columns))
                places[f"{layer.name_weight(part)}.{number}"] = _ModelPlace(fqn, total, box)
    return places


def _rename_others(first: ModelStates, layers: Sequence[_ExpertLayer]) -> dict[str, str]:
    names = {}
    for layer in layers:
        prefix = f"{layer.path}."
        own = [name for name in first.module if name.startswith(prefix)]
        # Among DeepSpeed's presets, only Qwen's have a gate; they use the singular for both names.
        has_gate = any(name.startswith(f"{prefix}shared_experts_gate.") for name in own)
        for name in own:
            rest = name.removeprefix(prefix)
            for old, new in (
                ("router.gate.", "gate."),
                ("router.", "gate."),
                *((("shared_experts", "shared_expert"),) if has_gate else ()),
            ):
                if rest.startswith(old):
                    names[name] = f"{prefix}{new}{rest.removeprefix(old)}"
                    break
    return names


def drop_aliases(first: ModelStates) -> ModelStates:
    """Return the model states without the second name of each router, that of the replaced module.

    Stage 3 has placeholders for both, and nothing states that they are one.
    """
    if not uses_autoep(first):
        return first
    names = set(first.module)
    aliases = {
        alias
        for entry in first.root["ds_autoep_layers"]
        for name in names
        if name.startswith(prefix := f"{entry['module_path']}.router.")
        and (alias := f"{entry['module_path']}.gate.{name.removeprefix(prefix)}") in names
    }
    module = {name: value for name, value in first.root["module"].items() if name not in aliases}
    buffers = [name for name in sorted(first.buffers) if name not in aliases]
    return replace(first, root={**first.root, "module": module, "buffer_names": buffers})


def _with_all_ranks(first: ModelStates, layers: Sequence[_ExpertLayer], size: int) -> ModelStates:
    weights = {layer.name_weight(part): (layer, part) for layer in layers for part in _PARTS}
    groups, ranks = [], []
    for group in first.shapes:
        own = [weights[name] for name in group if name in weights]
        if own and len(own) < len(group):
            raise CorruptError(
                first.file.path, "a param group contains experts and other parameters", MIXED
            )
        ranks.append(size if own else 1)
        listed = {
            layer.name_rank_weight(part, rank): group[layer.name_weight(part)]
            for rank in range(size)
            for layer, part in own
        }
        groups.append(listed or group)
    root = {**first.root, "param_shapes": groups}
    # It has patterns of AutoEP's own names, which the result does not have.
    root.pop("universal_checkpoint_info", None)
    # Each rank's optimizer lists its own experts without the rank.
    plain = {layer.name_rank_weight(part, 0): name for name, (layer, part) in weights.items()}
    return replace(first, root=root, expert_ranks=tuple(ranks), wrapped_names=plain)


def _read_weights(opened: Mapping[tuple[int, int], TorchFile]) -> Iterator[Entry]:
    for file in opened.values():
        root = file.root if isinstance(file.root, dict) else {}
        for name, tensor in root.items():
            if isinstance(tensor, Tensor):
                yield make_whole_entry(str(name), PARAM, tensor)


def _join(
    where: str,
    entries: Iterable[Entry],
    places: Mapping[str, _ModelPlace],
    names: Mapping[str, str],
) -> Iterator[Entry]:
    parts: dict[Key, list[tuple[Entry, _ModelPlace | None]]] = {}
    for entry in entries:
        place = places.get(entry.fqn)
        fqn = place.fqn if place else names.get(entry.fqn, entry.fqn)
        parts.setdefault(replace(entry, fqn=fqn).key, []).append((entry, place))
    for (kind, fqn), own in parts.items():
        first, place = own[0]
        if place is None:
            yield replace(first, fqn=fqn)
            continue
        dtype = check_parts_dtype(where, fqn, [entry for entry, _ in own])
        if first.shape == ():  # a step, equal for all
            chunks = tuple(chunk for entry, _ in own for chunk in entry.chunks)
            yield Entry(fqn, kind, dtype, (), chunks)
            continue
        chunks = tuple(chunk for entry, at in own if at for chunk in at.put(entry))
        yield Entry(fqn, kind, dtype, place.shape, chunks)


def _join_groups(groups: Sequence[ParamGroup]) -> tuple[ParamGroup, ...]:
    """Return the param groups as the program made them: DeepSpeed splits off the experts."""
    joined = [group for group in groups if not has_experts(group.hyper)]

    def drop_marks(group: ParamGroup) -> dict[str, Any]:
        return {key: value for key, value in group.hyper.items() if key not in ("name", "moe")}

    for experts in (group for group in groups if has_experts(group.hyper)):
        at = [n for n, group in enumerate(joined) if drop_marks(group) == drop_marks(experts)]
        if len(at) == 1:
            whole = joined[at[0]]
            joined[at[0]] = replace(whole, fqns=(*whole.fqns, *experts.fqns))
        else:
            joined.append(replace(experts, hyper=drop_marks(experts)))
    return tuple(joined)
