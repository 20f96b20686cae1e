"""The parameters that one rank of a run holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, chain, pairwise

from reshard.core.box import Box, Index
from reshard.core.manifest import Entry
from reshard.formats.megatron import grid, names, parameter_order
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import GridPosition
from reshard.formats.megatron.model_chunk import (
    ChunkShare,
    ParameterIndex,
    Spot,
    list_experts,
    make_share,
    make_spot,
)
from reshard.formats.megatron.optimizers.rank_optimizer import RankParam
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.shards import list_blocks


def index_parameters(whole: Mapping[str, Entry], table: Table) -> ParameterIndex[str]:
    """Return the names of a model's parameters, for lookup by the rank that holds them."""
    return ParameterIndex((_locate(fqn, table), fqn) for fqn in whole)


def _locate(fqn: str, table: Table) -> Spot:
    return make_spot(fqn, names.find_layer(fqn), names.find_expert(fqn, table))


def list_params(
    rank: GridPosition,
    index: ParameterIndex[str],
    whole: Mapping[str, Entry],
    args: Arguments,
    table: Table,
) -> list[RankParam]:
    """Return the parameters of a rank in ``named_parameters`` order, chunk after chunk.

    The shapes are local to the rank.

    Args:
        index: the `index_parameters` of ``whole``, which has every parameter of the model by name.
    """
    params: list[RankParam] = []
    for number, share in enumerate(_list_shares(rank, args)):
        fqns = list(index.find(share))
        if share.ends and args.tied and args.pp > 1 and names.EMBEDDING in whole:
            fqns.append(names.OUTPUT)  # the last stage has a copy of the tied embedding
        if share.has_mtp and not share.begins and names.EMBEDDING in whole:
            fqns.append(names.EMBEDDING)  # MTP layers have a copy, too
        ordered = sorted(
            fqns, key=lambda fqn: parameter_order.sort_key(parameter_order.spell(fqn, args))
        )
        shapes = {
            fqn: _list_blocks(fqn, _get_stored(fqn, whole), rank, args, table)[0] for fqn in ordered
        }
        dtypes = {fqn: _get_stored(fqn, whole).dtype.name for fqn in ordered}
        params += [
            # GroupedMLP's parameters are not among the model's names: they take the first one's
            # dtype.
            RankParam(fqn, shape, dtypes.get(fqn, dtypes[next(iter(dtypes))]), number)
            for fqn, shape in _group_experts(shapes, args).items()
        ]
    return params


def _list_shares(rank: GridPosition, args: Arguments) -> Iterator[ChunkShare]:
    starts = [0, *accumulate(chain.from_iterable(args.list_layers()))]
    layers = [range(start, stop) for start, stop in pairwise(starts)]
    experts = list_experts(rank.ep, args.ep, args.experts)
    mtp_at = args.locate_mtp(len(layers))
    for at in range(rank.pp, len(layers), args.pp):
        yield make_share(at, layers, experts, mtp_at)


def _get_stored(fqn: str, whole: Mapping[str, Entry]) -> Entry:
    return whole[names.EMBEDDING if fqn == names.OUTPUT and fqn not in whole else fqn]


def _list_blocks(
    fqn: str, stored: Entry, rank: GridPosition, args: Arguments, table: Table
) -> tuple[Index, tuple[tuple[Box, Box], ...]]:
    expert = names.find_expert(fqn, table) is not None
    ranks = args.etp if expert else args.tp
    at = args.get_expert_tensor_rank(rank.tp, rank.ep) if expert else rank.tp
    return list_blocks(fqn, stored.shape, grid.find_split(fqn, args, table), ranks, at)


def locate_piece(
    fqn: str, whole: Mapping[str, Entry], rank: GridPosition, args: Arguments, table: Table
) -> tuple[Entry, Index, tuple[tuple[Box, Box], ...]]:
    """Return a parameter, and the shape and blocks of a rank's piece of it."""
    stored = _get_stored(fqn, whole)
    return stored, *_list_blocks(fqn, stored, rank, args, table)


def _group_experts(shapes: Mapping[str, Index], args: Arguments) -> dict[str, Index]:
    if not args.flag("moe_use_legacy_grouped_gemm") or not args.flag("moe_grouped_gemm"):
        return dict(shapes)
    own = args.experts // args.ep
    grouped: dict[str, Index] = {}
    for fqn, shape in shapes.items():
        prefix, apart, rest = fqn.partition(".local_experts.")
        if not apart:
            grouped[fqn] = shape
        elif "linear_fc1" in rest:
            grouped[f"{prefix}.weight1"] = (shape[1], shape[0] * own)
        else:
            grouped[f"{prefix}.weight2"] = (shape[1] * own, shape[0])
    return grouped
