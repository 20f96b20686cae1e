"""A mixture of experts: its files, and the model as one rank with all experts would have it.

An expert-parallel rank calls its experts 0, 1, ... (names in ``param_shapes`` and in optimizers are
those of rank 0); its files number them through the layer: expert ``e`` of rank ``r`` is
``r * local + e``. Ranks that share an expert divide its optimizer state among them. Source:
DeepSpeed 0.19.8 ``runtime/engine.py`` (``_save_moe_checkpoint``), ``moe/experts.py``,
``moe/utils.py``, ``utils/groups.py`` (``_create_expert_and_data_parallel``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard import dtypes
from reshard.errors import CorruptError, IncompleteError, StaleError, UnsupportedError
from reshard.formats.deepspeed import expert_names, expert_optimizers, native, order
from reshard.formats.deepspeed.directory import Files
from reshard.formats.deepspeed.expert_files import Expert, counts_of, module_of, open_all
from reshard.formats.deepspeed.states import MIXED, ModelStates
from reshard.manifest import Manifest, ParamGroup


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
    experts = open_all(files, first)
    place = {name: at for at, name in enumerate(module_of(first, experts))}
    if files.expert_optim:
        manifest, sizes = expert_optimizers.read(files, first, experts, place)
    else:
        first, sizes = _with_all(first, experts)
        manifest = native.read(files.ranks[0], first, [expert.file for expert in experts])
    mesh = {**manifest.origin.mesh, "ep": max(sizes.values())}
    manifest = replace(manifest, origin=replace(manifest.origin, mesh=mesh))
    local = {layer: count // sizes[layer] for layer, count in counts_of(experts).items()}
    groups = [_in_order(manifest, group, place, local) for group in manifest.train.param_groups]
    return replace(manifest, train=replace(manifest.train, param_groups=tuple(groups)))


def _in_order(
    manifest: Manifest, group: ParamGroup, place: Mapping[str, int], local: Mapping[str, int]
) -> ParamGroup:
    """A group of experts in the module's order, where it stands rank by rank.

    Where the ranks have it in another order it stays rank by rank, in the order in which each was
    given it.

    Args:
        place: the module's order.
        local: how many experts of each layer a rank has.
    """
    ranks: dict[int, list[str]] = {}
    for fqn, own in zip(group.fqns, map(expert_names.parse, group.fqns), strict=True):
        if own is None:  # of a group of experts all are
            return group
        ranks.setdefault(own.number // local[own.layer], []).append(fqn)
    config, world = manifest.train.config, manifest.origin.mesh["world"]
    stage = order.section(config, "zero_optimization").get("stage", 0)
    trained = manifest.origin.precision
    if order.takes_turns(config, stage, dtypes.parse(trained) if trained else None):
        each = world // (expert_names.ranks_of(group.hyper) or 1)
        ranks = {rank: order.out_of_turns(held, each) for rank, held in ranks.items()}

    def at(fqn: str) -> int:
        return place.get(fqn, len(place))

    fqns = [fqn for rank in sorted(ranks) for fqn in ranks[rank]]
    if all(held == sorted(held, key=at) for held in ranks.values()):
        fqns.sort(key=at)
    return replace(group, fqns=tuple(fqns))


def _refuse(files: Files, first: ModelStates) -> None:
    place = files.location
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


def _with_all(
    first: ModelStates, experts: Sequence[Expert]
) -> tuple[ModelStates, Mapping[str, int]]:
    """ZeRO's model states as of a rank with all experts, and the ranks that share each layer.

    The members of a flat group of experts stand in it rank by rank.
    """
    local = _local(first.names)
    sizes: dict[str, int] = {}
    for layer, count in counts_of(experts).items():
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
                    found[str(own.numbered(number))] = name
                elif not own and rank == 0:
                    found[name] = name
        return found

    shapes = [{new: group[old] for new, old in spread(group).items()} for group in first.shapes]
    frozen, tied = first.mapping("frozen_param_shapes"), first.mapping("shared_params")
    root = first.root | {
        "module": module_of(first, experts),
        "param_shapes": shapes,
        "frozen_param_shapes": {new: frozen[old] for new, old in spread(frozen).items()}
        if frozen
        else first.root.get("frozen_param_shapes"),
        "buffer_names": list(spread(sorted(first.buffers))),
        "shared_params": {new: _beside(new, tied[old]) for new, old in spread(tied).items()},
    }
    groups = tuple(_size_of(first, group, sizes) for group in first.shapes)
    return replace(first, root=root, group_ranks=groups), sizes


def _beside(fqn: str, other: str) -> str:
    """Another parameter of the same expert, or what is of none."""
    own, its = expert_names.parse(fqn), expert_names.parse(other)
    return str(its.numbered(own.number)) if own and its else other


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


def _local(names: Iterable[str]) -> dict[str, int]:
    """How many experts of each layer one rank names."""
    found: dict[str, set[int]] = {}
    for name in filter(None, map(expert_names.parse, names)):
        found.setdefault(name.layer, set()).add(name.number)
    return {layer: len(numbers) for layer, numbers in found.items()}
