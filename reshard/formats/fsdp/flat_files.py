"""Lay out the files of ranks under FSDP 1: flat parameters, and each rank's raw optimizer.

    lay_out_fsdp1_local     LOCAL_STATE_DICT, and the optimizer of either setting of
                            ``use_orig_params``
    lay_out_fsdp1_sharded   SHARDED_STATE_DICT with a device mesh, and the same optimizers

Sources: torch 2.13 ``distributed/fsdp/_state_dict_utils.py`` (``_local_post_state_dict_hook``,
``_local_pre_load_state_dict_hook``), ``_flat_param.py`` (``_get_shard``: the padding); verl 0.9
``utils/checkpoint/fsdp_checkpoint_manager.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.core.dtypes import DType
from reshard.core.manifest import Skeleton
from reshard.errors import IncompleteError, UnsupportedError
from reshard.formats.fsdp.flat_optimizers import FlatOptimizer, OrigOptimizer
from reshard.formats.fsdp.flat_units import Flat, build_flats, exclude_ignored, find_ignored
from reshard.formats.fsdp.rank_files import (
    PAIR,
    VERL,
    FileNames,
    assign_files,
    lay_out_extras,
)
from reshard.formats.parameter_kinds import build_is_divided
from reshard.formats.request import Request
from reshard.formats.trainers.accelerate import lay_out_accelerate_extras
from reshard.layouts.mesh import MeshGrid, MeshPlacements
from reshard.model import ModelShapes
from reshard.state_dict import torch_state_dict
from reshard.state_dict.slots import RankSharder, WholeSlots, build_whole_slot
from reshard.state_dict.torch_state_dict import StateTensor
from reshard.training.state import WritableState


def lay_out_fsdp1_local(
    state: WritableState,
    model: ModelShapes,
    request: Request,
    *,
    naming: FileNames = PAIR,
    sharded: bool = True,
    compute: DType | None = None,
) -> Skeleton:
    """Lay out LOCAL_STATE_DICT and the raw optimizer of each rank.

    Args:
        model: what was wrapped, with its units.
        sharded: False for NO_SHARD, where each rank has whole tensors; one rank always has.
        compute: with ``use_orig_params=True``, the dtype of the forward pass
            (``MixedPrecision.param_dtype``, else the parameters' own); None writes what
            ``use_orig_params=False`` has. FSDP 1 itself does not load what it writes with
            ``use_orig_params=True``; our trainer copies it into the live shards.
    """
    ranks, dtype, weights_only = request.world_size, request.dtype, request.weights_only
    model = exclude_ignored(state, model)
    flats = build_flats(state, model, dtype)
    plain = _find_plain(state, model, dtype)
    raw = None if weights_only else _build_raw_optimizer(state, model, flats, compute)

    pieces = ranks if sharded else 1

    def lay_out_rank(rank: int) -> Iterator[Skeleton]:
        weights: OrderedDict[str, Any] = OrderedDict()
        if pieces == 1:
            values = torch_state_dict.build_weights(state, dtype=dtype)
            weights.update((name, build_whole_slot(value)) for name, value in values.items())
        else:
            weights.update(_build_pieces(flats, model, compute, rank, pieces))
            weights.update((name, build_whole_slot(value)) for name, value in plain.items())
        moments = None if raw is None else raw.build_rank(rank if pieces > 1 else 0, pieces)
        yield from _lay_out_files(state, naming, weights, moments, rank, ranks)
        yield from lay_out_extras(state, request, naming, rank, version=1)

    files = [file for rank in range(ranks) for file in lay_out_rank(rank)]
    if naming.accelerate and not weights_only:
        files += lay_out_accelerate_extras(state, ranks)
    return skeletons.join(files)


def lay_out_fsdp1_sharded(
    state: WritableState,
    model: ModelShapes,
    request: Request,
    grid: MeshGrid,
) -> Skeleton:
    """Lay out DTensors of each rank and its raw optimizer, as verl keeps them.

    With ``request.orig_params``, they have the form of ``use_orig_params=True``.

    Raises:
        IncompleteError, UnsupportedError, UsageError: as `lay_out_fsdp1_local`.
    """
    if len(grid.sizes) > 1:
        raise UnsupportedError(
            f"a mesh of {grid}", "FSDP 1 does not support a mesh of several axes"
        )
    placements, ranks, dtype = MeshPlacements(grid), grid.world, request.dtype
    model = exclude_ignored(state, model)
    flats = build_flats(state, model, dtype)
    values = OrderedDict(
        torch_state_dict.build_weights(state, dtype=dtype, divided=build_is_divided(state, model))
    )
    compute, weights_only = request.orig_params, request.weights_only
    raw = None if weights_only else _build_raw_optimizer(state, model, flats, compute)

    def lay_out_rank(rank: int) -> Iterator[Skeleton]:
        moments = None if raw is None else raw.build_rank(rank, ranks)
        yield from _lay_out_files(
            state, VERL, RankSharder(placements, rank).convert(values), moments, rank, ranks
        )
        yield from lay_out_extras(state, request, VERL, rank, version=1)

    return skeletons.join(file for rank in range(ranks) for file in lay_out_rank(rank))


def _build_raw_optimizer(
    state: WritableState, model: ModelShapes, flats: Sequence[Flat], compute: DType | None
) -> FlatOptimizer | OrigOptimizer:
    if compute is None:
        return FlatOptimizer(state, model, flats)
    return OrigOptimizer(state, model, flats, compute)


def _build_pieces(
    flats: Sequence[Flat], model: ModelShapes, compute: DType | None, rank: int, ranks: int
) -> dict[str, Any]:
    if compute is None:
        return {flat.key: flat.build_shard(rank, ranks) for flat in flats}
    pieces_and_views = {flat.key: flat.build_views(compute, rank, ranks) for flat in flats}
    views = {
        fqn: view
        for _, views_of_unit in pieces_and_views.values()
        for fqn, view in views_of_unit.items()
    }
    named = {name: views[name] for name in model.parameters if name in views}
    named |= {alias: named[kept] for alias, kept in model.tied.items() if kept in named}
    return {**named, **{key: piece for key, (piece, _) in pieces_and_views.items()}}


def _lay_out_files(
    state: WritableState,
    naming: FileNames,
    weights: Any,
    moments: Any,
    rank: int,
    ranks: int,
) -> Iterator[Skeleton]:
    names = naming.format_pair(rank, ranks)
    for name, root in assign_files(names, weights, moments).items():
        stamp = state.stamp(name, rank, ranks)
        yield torch_writer.lay_out_object(name, root, slot_of=WholeSlots(), stamp=stamp)


def _find_plain(
    state: WritableState, model: ModelShapes, dtype: DType | None
) -> dict[str, StateTensor]:
    every = torch_state_dict.build_weights(state, dtype=dtype)
    owners = {fqn: weight.fqn for fqn, weight in find_ignored(state, model).items()}
    owners |= {name: name for name in model.buffers}
    owners |= {alias: owners[first] for alias, first in model.tied.items() if first in owners}
    missing = [name for name in model.buffers if name not in every]
    if missing:
        raise IncompleteError(
            state.manifest.origin.path, f"has no {missing[0]!r}, but {model.source} has it"
        )
    return {name: every[owner] for name, owner in owners.items()}
