"""What one rank of a run holds of a model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from reshard.box import Index
from reshard.formats.megatron import grid, names, order
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import Rank
from reshard.formats.megatron.optimizer import Held
from reshard.manifest import Entry
from reshard.model_parallel.rules import Table
from reshard.model_parallel.shards import blocks


def of_rank(rank: Rank, whole: Mapping[str, Entry], args: Arguments, table: Table) -> list[Held]:
    """The parameters of a rank in the order of ``named_parameters``, chunk after chunk.

    Their shapes are those of the rank's parts.

    Args:
        whole: every parameter of the model, by name.
    """
    counts = args.layers()
    starts = [0, *accumulate(count for stages in counts for count in stages)]
    found: list[Held] = []
    for number, stages in enumerate(counts):
        first = starts[number * args.pp + rank.pp]
        layers = range(first, first + stages[rank.pp])
        begins = rank.pp == 0 and number == 0
        ends = rank.pp == args.pp - 1 and number == len(counts) - 1
        held = [fqn for fqn in whole if _is_held(fqn, rank, args, layers, begins, ends)]
        if ends and args.tied and args.pp > 1 and names.EMBEDDING in whole:
            held.append(names.OUTPUT)
        ordered = sorted(held, key=order.place)
        shapes = {fqn: _local(fqn, whole, rank, args, table) for fqn in ordered}
        dtypes = {fqn: _stored(fqn, whole).dtype.name for fqn in ordered}
        found += [
            Held(fqn, shape, dtypes.get(fqn, dtypes[next(iter(dtypes))]), number)
            for fqn, shape in _side_by_side(shapes, args).items()
        ]
    return found


def _stored(fqn: str, whole: Mapping[str, Entry]) -> Entry:
    return whole[names.EMBEDDING if fqn == names.OUTPUT and fqn not in whole else fqn]


def _is_held(
    fqn: str, rank: Rank, args: Arguments, layers: range, begins: bool, ends: bool
) -> bool:
    expert = names.expert_of(fqn)
    if expert is not None and expert // (args.experts // args.ep) != rank.ep:
        return False
    number = names.layer_of(fqn)
    if number is not None:
        return number in layers
    return begins if order.is_embedding(fqn) else ends


def _local(
    fqn: str, whole: Mapping[str, Entry], rank: Rank, args: Arguments, table: Table
) -> Index:
    expert = names.expert_of(fqn) is not None
    ranks = args.etp if expert else args.tp
    at = args.expert_place(rank.tp, rank.ep) if expert else rank.tp
    shape, _ = blocks(fqn, _stored(fqn, whole).shape, grid.split_of(fqn, args, table), ranks, at)
    return shape


def _side_by_side(shapes: Mapping[str, Index], args: Arguments) -> dict[str, Index]:
    """GroupedMLP's experts as the two parameters that they are (see `grouped`)."""
    if not args.flag("moe_use_legacy_grouped_gemm") or not args.flag("moe_grouped_gemm"):
        return dict(shapes)
    own = args.experts // args.ep
    found: dict[str, Index] = {}
    for fqn, shape in shapes.items():
        prefix, apart, rest = fqn.partition(".local_experts.")
        if not apart:
            found[fqn] = shape
        elif "linear_fc1" in rest:
            found[f"{prefix}.weight1"] = (shape[1], shape[0] * own)
        else:
            found[f"{prefix}.weight2"] = (shape[1] * own, shape[0])
    return found
