"""A mixture of experts: its files, and the model as one rank with all experts would have it.

An expert-parallel rank calls its experts 0, 1, ... (names in ``param_shapes`` and in optimizers are
those of rank 0); its files number them through the layer: expert ``e`` of rank ``r`` is
``r * local + e``. Ranks that share an expert divide its optimizer state among them. Source:
DeepSpeed 0.19.8 ``runtime/engine.py`` (``_save_moe_checkpoint``), ``moe/experts.py``,
``moe/utils.py``, ``utils/groups.py`` (``_create_expert_and_data_parallel``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.errors import CorruptError, IncompleteError, StaleError, UnsupportedError
from reshard.formats import torch_file
from reshard.formats.deepspeed import expert_names, native
from reshard.formats.deepspeed.directory import Files
from reshard.formats.deepspeed.states import MIXED, ModelStates
from reshard.formats.torch_file import Tensor, TorchFile
from reshard.manifest import BUFFER, PARAM, Manifest, TrainState
from reshard.model_parallel import combine

_GROUP = re.compile(r"ep_size_(\d+)")


@dataclass(frozen=True, slots=True)
class _Expert:
    """One file: an expert of a layer; ``layer`` is the prefix of the layer's names."""

    layer: str
    number: int
    file: TorchFile
    tensors: Mapping[str, Tensor]


def read(files: Files) -> Manifest:
    """Describe the training state that all expert-parallel ranks hold together.

    Raises:
        IncompleteError: an expert's or a rank's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: experts together with another form of model parallelism, and what is not
            DeepSpeed's own layer of experts.
    """
    first = native.first_of(files.ranks[0])
    _refuse(files, first)
    experts = _open(files, first)
    place = {name: at for at, name in enumerate(_module(first, experts))}
    if files.expert_optim:
        manifest, ranks = _without_zero(files, first, experts, place)
    else:
        first, ranks = _with_all(first, experts)
        manifest = native.read(files.ranks[0], first, [expert.file for expert in experts])
    mesh = {**manifest.origin.mesh, "ep": ranks}
    return replace(
        manifest,
        origin=replace(manifest.origin, mesh=mesh),
        train=_in_order(manifest.train, place),
    )


def _in_order(state: TrainState, place: Mapping[str, int]) -> TrainState:
    """Param groups of experts in the module's order, where they stand rank by rank."""

    def at(fqn: str) -> int:
        return place.get(fqn, len(place))

    groups = [
        replace(group, fqns=tuple(sorted(group.fqns, key=at)))
        if any(map(expert_names.parse, group.fqns))
        else group
        for group in state.param_groups
    ]
    return replace(state, param_groups=tuple(groups))


def _refuse(files: Files, first: ModelStates) -> None:
    place = files.place
    if first.root.get("ds_autoep_layers"):
        raise UnsupportedError(place, "holds experts of AutoEP, which are not read yet")
    if files.layers or set(files.ranks) != {0}:
        raise UnsupportedError(
            place, "holds experts of a tensor- or pipeline-parallel run, which are not read yet"
        )
    if any(layer < 0 for layer, _ in files.experts):
        raise UnsupportedError(
            place, "holds expert_N files that name no layer, of DeepSpeed before 0.5: not read"
        )
    if files.ranks[0].model_is_sharded:
        raise UnsupportedError(place, "holds experts of ZeRO stage 3, which are not read yet")
    if not (files.expert_optim or first.shapes):
        raise IncompleteError(
            place,
            "holds experts of a run without ZeRO, and no expp_rank_*_optim_states.pt",
            "copy them here (each expert-parallel rank has one)",
        )
    if files.expert_optim and files.ranks[0].optim:
        raise StaleError(
            place,
            "holds optimizer states of a run with ZeRO (zero_pp_rank_*) and of one without"
            " (expp_rank_*)",
            "move the files of the older run away",
        )


def _open(files: Files, first: ModelStates) -> list[_Expert]:
    """Every expert of every layer, in order; ``num_experts`` lists how many each layer has."""
    held: dict[int, dict[int, Path]] = {}
    for (layer, number), ranks in sorted(files.experts.items()):
        held.setdefault(layer, {})[number] = ranks[0]
    said = first.root.get("num_experts")
    counts = [1 + max(held[layer]) for layer in sorted(held)]
    if isinstance(said, list) and all(isinstance(count, int) for count in said):
        counts = list(said)
    wanted = {(layer, number) for layer, count in enumerate(counts) for number in range(count)}
    if missing := sorted(wanted - files.experts.keys()):
        layer, number = missing[0]
        raise IncompleteError(
            files.place,
            f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt is missing; the model has"
            f" {sum(counts)} experts in {len(counts)} layers",
            "copy it here (a node-local disk may still hold it)",
        )
    if extra := sorted(files.experts.keys() - wanted):
        layer, number = extra[0]
        raise StaleError(
            held[layer][number],
            f"is of an expert that the model has not: it has {counts} in its layers",
            "files of two runs are mixed: move those of the other run away",
        )
    experts = [
        _expert(path, number) for layer in sorted(held) for number, path in held[layer].items()
    ]
    _check_alike(experts)
    return experts


def _check_alike(experts: Sequence[_Expert]) -> None:
    """The experts of a layer are copies of one module."""
    layers: dict[str, tuple[_Expert, set[str]]] = {}
    for expert in experts:
        names = {parsed.rest for parsed in map(expert_names.parse, expert.tensors) if parsed}
        first, wanted = layers.setdefault(expert.layer, (expert, names))
        if names != wanted:
            raise CorruptError(
                expert.file.path,
                f"does not hold the same of its expert as {Path(first.file.path).name}:"
                f" {', '.join(sorted(names ^ wanted)[:3])}",
                MIXED,
            )


def _expert(path: Path, number: int) -> _Expert:
    file = torch_file.read(path)
    found = file.root if isinstance(file.root, dict) else {}
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    names = map(expert_names.parse, tensors)
    owners = {(name.layer, name.number) if name else None for name in names}
    if len(owners) != 1 or (owner := owners.pop()) is None or owner[1] != number:
        raise CorruptError(path, f"does not hold expert {number} of one layer, and nothing else")
    return _Expert(owner[0], number, file, tensors)


def _with_all(first: ModelStates, experts: Sequence[_Expert]) -> tuple[ModelStates, int]:
    """ZeRO's model states as of a rank with all experts, and the expert-parallel ranks.

    The members of a flat group of experts stand in it rank by rank.
    """
    local = _local(first.names)
    sizes: dict[str, int] = {}
    for layer, count in _counts(experts).items():
        if not local.get(layer) or count % local[layer]:
            raise CorruptError(
                first.file.path,
                f"lists {local.get(layer, 0)} experts of {layer!r}, and there are files of {count}",
                MIXED,
            )
        sizes[layer] = count // local[layer]
    if unknown := local.keys() - sizes.keys():
        raise IncompleteError(
            first.file.path, f"lists experts of {min(unknown)!r}, of which there is no file", MIXED
        )

    def spread(names: Iterable[str]) -> dict[str, str]:
        """Global name -> rank 0's, rank by rank; a name of no expert stands for itself."""
        held = list(names)
        found = {}
        for rank in range(max(sizes.values())):
            for name in held:
                own = expert_names.parse(name)
                if own and rank < sizes[own.layer]:
                    number = rank * local[own.layer] + own.number
                    found[str(replace(own, number=number))] = name
                elif not own and rank == 0:
                    found[name] = name
        return found

    shapes = [{new: group[old] for new, old in spread(group).items()} for group in first.shapes]
    frozen = first.mapping("frozen_param_shapes")
    root = first.root | {
        "module": _module(first, experts),
        "param_shapes": shapes,
        "frozen_param_shapes": {new: frozen[old] for new, old in spread(frozen).items()}
        if frozen
        else first.root.get("frozen_param_shapes"),
        "buffer_names": list(spread(sorted(first.buffers))),
    }
    groups = tuple(_size_of(first, group, sizes) for group in first.shapes)
    return replace(first, root=root, group_ranks=groups), max(sizes.values())


def _size_of(first: ModelStates, group: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The expert-parallel ranks of one group, whose members all have as many."""
    names = map(expert_names.parse, group)
    found = {sizes[name.layer] if name else 1 for name in names}
    if len(found) > 1:
        raise CorruptError(
            first.file.path,
            f"a param group holds parameters of {sorted(found)} expert-parallel ranks together",
            MIXED,
        )
    return found.pop() if found else 1


def _counts(experts: Sequence[_Expert]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for expert in experts:
        counts[expert.layer] = counts.get(expert.layer, 0) + 1
    return counts


def _local(names: Iterable[str]) -> dict[str, int]:
    """How many experts of each layer one rank names."""
    found: dict[str, set[int]] = {}
    for name in filter(None, map(expert_names.parse, names)):
        found.setdefault(name.layer, set()).add(name.number)
    return {layer: len(numbers) for layer, numbers in found.items()}


def _module(first: ModelStates, experts: Sequence[_Expert]) -> dict[str, Any]:
    """The module's tensors in its order: a layer's experts follow its gate."""
    own = first.root.get("module") or {}
    last = {
        name.partition(".deepspeed_moe.")[0] + ".deepspeed_moe.": name
        for name in own
        if ".deepspeed_moe." in name
    }
    after: dict[str, list[_Expert]] = {}
    for expert in experts:
        after.setdefault(last.get(expert.layer, ""), []).append(expert)
    module: dict[str, Any] = {}
    for name, value in own.items():
        module[name] = value
        for expert in after.pop(name, []):
            module.update(expert.tensors)
    for rest in after.values():
        for expert in rest:
            module.update(expert.tensors)
    return module


def _without_zero(
    files: Files, first: ModelStates, experts: Sequence[_Expert], place: Mapping[str, int]
) -> tuple[Manifest, int]:
    """Each expert-parallel rank has an optimizer of its own, under indices: read one by one."""
    count = 1 + max(rank for rank, _ in files.expert_optim)
    optimizers = []
    for rank in range(count):
        path = files.expert_optim.get((rank, 0))
        if path is None:
            raise IncompleteError(
                files.place, f"expp_rank_{rank}_mp_rank_00_optim_states.pt is missing", "copy it"
            )
        optimizers.append(torch_file.read(path))
    counts = _counts(experts)
    for file in optimizers:
        _check_sizes(file, count, counts)
    ranks = []
    for rank, file in enumerate(optimizers):
        held = [e for e in experts if e.number * count // counts[e.layer] == rank]
        root = first.root | {"module": _module(first, held), "optimizer": _optimizer(file)}
        opened = [file, *(expert.file for expert in held)]
        manifest = native.read(files.ranks[0], replace(first, root=root), opened)
        if rank:  # what no expert is lies in one file for all
            manifest = manifest.with_entries(
                entry
                for entry in manifest.entries.values()
                if entry.kind not in (PARAM, BUFFER) or expert_names.parse(entry.fqn)
            )
        ranks.append(manifest)
    joined = combine.stages(ranks)
    entries = sorted(joined.entries.values(), key=lambda entry: place.get(entry.fqn, len(place)))
    return joined.with_entries(entries), count


def _optimizer(file: TorchFile) -> dict[str, Any]:
    held = file.root.get("optimizer") if isinstance(file.root, dict) else None
    return held if isinstance(held, dict) else {}


def _check_sizes(file: TorchFile, count: int, counts: Mapping[str, int]) -> None:
    """All layers are shared by as many ranks, and files of so many are here."""
    optimizer = _optimizer(file)
    inner = optimizer.get("optimizer_state_dict", optimizer)
    names = [str(group.get("name")) for group in inner.get("param_groups", []) if group.get("moe")]
    sizes = {int(match[1]) for match in map(_GROUP.fullmatch, names) if match}
    if len(sizes) > 1:
        raise UnsupportedError(
            file.path,
            f"is of a run without ZeRO, whose layers of experts are shared by {sorted(sizes)} ranks"
            " each: which are shared by how many is nowhere said",
        )
    if sizes and max(sizes) > count:
        raise IncompleteError(
            file.path,
            f"is of {max(sizes)} expert-parallel ranks, and optimizer states of {count} are here",
            "copy the missing expp_rank_* files here",
        )
    uneven = {layer: held for layer, held in counts.items() if held % count}
    if uneven or (sizes and max(sizes) < count):
        raise StaleError(
            file.path,
            f"is of {max(sizes, default=count)} expert-parallel ranks; optimizer states of {count}"
            f" and files of {sorted(counts.values())} experts a layer are here",
            "files of two runs are mixed: move those of the other run away",
        )
