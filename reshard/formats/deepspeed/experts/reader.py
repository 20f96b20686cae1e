"""Read a mixture of experts: its files, and the model that a rank with all experts would have.

An expert-parallel rank numbers its experts 0, 1, ... (names in ``param_shapes`` and in optimizers
are those of rank 0); its files number them through the layer: expert ``e`` of rank ``r`` is
``r * local + e``. Ranks that share an expert divide its optimizer state among them. Source:
DeepSpeed 0.19.8 ``runtime/engine.py`` (``_save_moe_checkpoint``), ``moe/experts.py``,
``moe/utils.py``, ``utils/groups.py`` (``_create_expert_and_data_parallel``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.core import dtypes
from reshard.core.manifest import Manifest, ParamGroup
from reshard.errors import MIXED, CorruptError, IncompleteError, StaleError, UnsupportedError
from reshard.formats.deepspeed import flat_order, tag_directory
from reshard.formats.deepspeed.directory import TagFiles
from reshard.formats.deepspeed.experts import lists, optimizers
from reshard.formats.deepspeed.experts.files import (
    Expert,
    count_experts,
    insert_experts,
    open_experts,
)
from reshard.formats.deepspeed.experts.layout import find_expert_parallel_size, parse_expert_name
from reshard.formats.deepspeed.states import ModelStates
from reshard.layouts.model_parallel import combine
from reshard.units import abridge

_LISTED = 4
_NO_BUFFERS = (
    "DeepSpeed before 0.19 does not list the buffers of a run with experts: what the optimizer does"
    " not have is taken for frozen parameters"
)


def read(files: TagFiles, first: ModelStates) -> Manifest:
    """Describe the training state that all expert-parallel ranks hold together.

    Raises:
        IncompleteError: an expert's or a rank's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: experts of stage 3, or of another class than DeepSpeed's MoE layer.
    """
    files = optimizers.leave_out_repeated(files)
    refuse(files, first)
    experts = open_experts(files, first)
    module = insert_experts(first, experts)
    lacks_lists = bool(files.ranks[0].optim) and not first.root.get("param_shapes")
    if lacks_lists:
        first = lists.complete(first, files.ranks[0], module)
    if files.expert_optim:
        ranks, sizes = optimizers.read(files, [first], experts)
        manifest = combine.join_stages([rank for _, rank in ranks])
    else:
        first, sizes = with_all_experts(first, experts)
        manifest = tag_directory.read(files.ranks[0], first, [expert.file for expert in experts])
    manifest = sort_by_module(manifest, module, count_experts(experts), sizes)
    if lacks_lists and manifest.frozen:
        text = f"{_NO_BUFFERS}: {abridge(sorted(manifest.frozen), _LISTED)}"
        manifest = replace(manifest, warnings=(*manifest.warnings, text))
    return manifest


def sort_by_module(
    manifest: Manifest,
    module: Iterable[str],
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
) -> Manifest:
    """Return the manifest in the module's order, with the number of expert-parallel ranks.

    Args:
        module: the names of the module with all experts, in order.
        counts: the experts of each layer.
        sizes: the expert-parallel ranks that share each layer.
    """
    position = {name: at for at, name in enumerate(module)}
    mesh = {**manifest.origin.mesh, "ep": max(sizes.values())}
    manifest = replace(manifest, origin=replace(manifest.origin, mesh=mesh))
    per_rank = {layer: count // sizes[layer] for layer, count in counts.items()}
    groups = [
        _sort_group(manifest, group, position, per_rank) for group in manifest.train.param_groups
    ]
    manifest = replace(manifest, train=replace(manifest.train, param_groups=tuple(groups)))
    return manifest.with_entries(
        sorted(manifest.entries.values(), key=lambda e: position.get(e.fqn, len(position)))
    )


def _sort_group(
    manifest: Manifest,
    group: ParamGroup,
    position: Mapping[str, int],
    per_rank: Mapping[str, int],
) -> ParamGroup:
    # A group of experts is stored rank by rank. It gets the module's order, unless a rank's members
    # have another one, which the user gave them.
    ranks: dict[int, list[str]] = {}
    for fqn, own in zip(group.fqns, map(parse_expert_name, group.fqns), strict=True):
        if own is None:  # not a group of experts, in which all members belong to experts
            return group
        ranks.setdefault(own.number // per_rank[own.layer], []).append(fqn)
    config, world = manifest.train.config, manifest.origin.mesh["world"]
    stage = flat_order.get_zero_section(config).get("stage", 0)
    trained = manifest.origin.precision
    if flat_order.uses_round_robin(config, stage, dtypes.parse(trained) if trained else None):
        sharing = world // (find_expert_parallel_size(group.hyper) or 1)
        ranks = {rank: flat_order.undo_round_robin(fqns, sharing) for rank, fqns in ranks.items()}

    def find_position(fqn: str) -> int:
        return position.get(fqn, len(position))

    fqns = [fqn for rank in sorted(ranks) for fqn in ranks[rank]]
    if all(own == sorted(own, key=find_position) for own in ranks.values()):
        fqns.sort(key=find_position)  # so that the order no longer depends on the number of ranks
    return replace(group, fqns=tuple(fqns))


def refuse(files: TagFiles, first: ModelStates) -> None:
    """Refuse runs with experts that are not read yet, and files of two runs.

    Raises:
        UnsupportedError: naming what is not read.
        IncompleteError: there are no optimizer states.
        StaleError: there are optimizer states of two runs.
    """
    where = files.location
    if any(layer < 0 for layer, _ in files.experts):
        raise UnsupportedError(
            where,
            "contains expert_N files without a layer number, from DeepSpeed before 0.5, which"
            " reshard does not read",
        )
    if files.ranks[0].model_is_sharded:
        raise UnsupportedError(
            where, "contains experts of ZeRO stage 3, which reshard does not read yet"
        )
    if not (files.expert_optim or files.ranks[0].optim or first.shapes):
        raise IncompleteError(
            where,
            "contains experts of a run without ZeRO, but no expp_rank_*_optim_states.pt",
            "copy them here (each expert-parallel rank has one)",
        )
    if files.expert_optim and files.ranks[0].optim:
        raise StaleError(
            where,
            "contains optimizer states of a run with ZeRO (zero_pp_rank_*) and of one without"
            " (expp_rank_*)",
            "move the files of the older run away",
        )


def with_all_experts(
    first: ModelStates, experts: Sequence[Expert]
) -> tuple[ModelStates, Mapping[str, int]]:
    """Return the model states of a rank with all experts, and the ranks that share each layer.

    A flat group of experts lists its members rank by rank.

    Raises:
        CorruptError: a rank does not list an equal part of a layer's experts.
        IncompleteError: a layer has no file of an expert.
    """
    per_rank = _count_local(first.declared_names)
    names = first.root.get("module") or {}
    sizes: dict[str, int] = {}
    for layer, count in count_experts(experts).items():
        if layer not in per_rank and any(name.startswith(f"{layer}gate.") for name in names):
            # All its experts are frozen, which stage 1 does not list; no partition depends on how
            # many ranks share them.
            sizes[layer] = 1
            continue
        if not per_rank.get(layer) or count % per_rank[layer]:
            raise CorruptError(
                first.file.path,
                f"lists {per_rank.get(layer, 0)} experts of {layer!r}, but there are files of"
                f" {count}",
                MIXED,
            )
        sizes[layer] = count // per_rank[layer]
    if unknown := per_rank.keys() - sizes.keys():
        raise IncompleteError(
            first.file.path,
            f"lists experts of {min(unknown)!r}, but there is no file of them",
            MIXED,
        )

    def list_global_names(names: Iterable[str]) -> dict[str, str]:
        """Return global name -> rank 0's name, rank by rank; other names map to themselves."""
        listed = list(names)
        local_names = {}
        for rank in range(max(sizes.values())):  # layers may differ in how many ranks share them
            for name in listed:
                own = parse_expert_name(name)
                if own and rank < sizes[own.layer]:
                    number = rank * per_rank[own.layer] + own.number
                    local_names[str(own.renumber(number))] = name
                elif not own and rank == 0:
                    local_names[name] = name
        return local_names

    frozen, tied = first.get_section("frozen_param_shapes"), first.get_section("shared_params")
    root = first.root | {
        "module": insert_experts(first, experts),
        "param_shapes": [
            {new: group[old] for new, old in list_global_names(group).items()}
            for group in first.shapes
        ],
        "frozen_param_shapes": {new: frozen[old] for new, old in list_global_names(frozen).items()}
        if frozen
        else first.root.get("frozen_param_shapes"),
        "buffer_names": list(list_global_names(sorted(first.buffers))),
        "shared_params": {
            new: _move_to_expert(new, tied[old]) for new, old in list_global_names(tied).items()
        },
    }
    expert_ranks = tuple(_find_group_size(first, group, sizes) for group in first.shapes)
    return replace(first, root=root, expert_ranks=expert_ranks), sizes


def _move_to_expert(fqn: str, other: str) -> str:
    own, its = parse_expert_name(fqn), parse_expert_name(other)
    return str(its.renumber(own.number)) if own and its else other


def _find_group_size(first: ModelStates, group: Iterable[str], sizes: Mapping[str, int]) -> int:
    names = map(parse_expert_name, group)
    own = {sizes[name.layer] if name else 1 for name in names}
    if len(own) > 1:
        raise CorruptError(
            first.file.path,
            "a param group contains parameters with different numbers of expert-parallel ranks:"
            f" {sorted(own)}",
            MIXED,
        )
    return own.pop() if own else 1


def _count_local(names: Iterable[str]) -> dict[str, int]:
    experts: dict[str, set[int]] = {}
    for name in filter(None, map(parse_expert_name, names)):
        experts.setdefault(name.layer, set()).add(name.number)
    return {layer: len(numbers) for layer, numbers in experts.items()}
