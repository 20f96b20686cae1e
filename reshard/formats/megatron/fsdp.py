"""The fsdp_dtensor format of Megatron FSDP: plain DCP, with names of the live model.

    args, iteration, opt_param_scheduler ...       what common.pt has in torch_dist
    model.module.<name>                            a parameter in fp32, uneven shards of a DTensor
    model.module.<name>_w, <name>_v                gate and up of a gated linear unit
    model.module.<name>.query, <name>.key ...      parts of a gated delta net's fused projection
    optimizer.state.module.module.<name>.exp_avg   a slot
    optimizer.param_to_group_meta.module.<name>    the settings of its param group

``<name>`` counts layers and experts through the whole model. Tensor-parallel ranks are a dim of the
DTensor's mesh, so each parameter is whole, if ranks cut it in one piece.

Sources: Megatron-LM core_v0.16.1 ``core/transformer/fsdp_dtensor_checkpoint.py``,
``core/optimizer/distrib_optimizer.py`` (sharded_param_state_fsdp_dtensor); core_v0.19.2
``core/transformer/fsdp_dtensor_checkpoint.py`` (handle_gdn_in_state_dict); d98e8a6
``megatron/training/checkpointing.py`` (preprocess_fsdp_dtensor_state_dict).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.containers.pickles import trust
from reshard.containers.torch_objects import TorchFile
from reshard.core.location import Location
from reshard.core.manifest import (
    BUFFER,
    PARAM,
    Manifest,
    Origin,
    ParamGroup,
    index_entries,
)
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats.dcp import reader as dcp
from reshard.formats.megatron import (
    arguments,
    dist,
    grid,
    names,
    rank_states,
    run_config,
    train,
    verl,
)
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import FSDP_DTENSOR
from reshard.formats.megatron.optimizers import rank_optimizer
from reshard.formats.megatron.rank_states import RankStates
from reshard.layouts.model_parallel.rules import Table
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.optimizers.hyper_parameters import read_counter, read_hyper
from reshard.state_dict.optimizers.states import ParsedOptimizer
from reshard.state_dict.tree import as_global
from reshard.system.files import SourceFiles

_WRAPPER = "module."
_STEP = "step"
_RANKS = re.compile(r"\((\d{1,9}), ?(\d{1,9})\)")


def read(location: Location, table: Table) -> Manifest:
    """Return the manifest of the checkpoint in one directory.

    Raises:
        IncompleteError: a file is missing.
        CorruptError: files contradict each other, or there is no model.
        UnsupportedError: tensor-parallel ranks cut a parameter in several pieces.
    """
    loaded = dcp.read(location)
    root, opened = loaded.root, list[TorchFile]()
    if root.get("args") is None and run_config.NAME in location.files:
        root["args"], opened = run_config.read(location)
    loaded = verl.join_parts([loaded], opened)
    args = arguments.parse(root.get("args"), str(location))
    parts = _get_tensors(root.get("model"))
    if not parts:
        raise CorruptError(location, "contains no model")
    stored = dist.join_parts(parts, table)
    _refuse_several_pieces(location, [name for name in parts if name in stored], args, table)
    weights = [
        tensor.make_entry(fqn, BUFFER if names.is_buffer(fqn) else PARAM)
        for fqn, tensor in stored.items()
    ]
    whole = index_entries(grid.sort_entries(weights))
    fqns = [fqn for kind, fqn in whole if kind == PARAM]
    state = _read_optimizer(root.get("optimizer"), fqns, table)
    trained = {entry.fqn for entry in state.entries}
    frozen = [fqn for fqn in fqns if trained and fqn not in trained]
    rng = _read_random_states(root.get(rank_states.RNG))
    manifest = Manifest(
        origin=Origin("megatron", str(location)),
        entries=index_entries(grid.sort_entries([*whole.values(), *state.entries])),
        files=loaded.files,
        train=train.make_train_state(
            {**root, rank_states.RNG: next(iter(rng.values()), None)},
            args,
            state,
            range(0),
        ),
        tied=names.find_tied_output(fqns, args),
        frozen=frozenset(frozen),
        warnings=(*loaded.notes, *rank_optimizer.note_frozen(frozen)),
        unknown_globals=trust.list_unknown(loaded.globals),
        ordered=True,  # see `grid.sort_entries`
    )
    manifest = rank_states.attach(manifest, RankStates(FSDP_DTENSOR, rng=rng))
    return replace(manifest, origin=train.make_origin(location, args, FSDP_DTENSOR, manifest))


def _read_random_states(value: Any) -> dict[tuple[int, ...], Any]:
    stated = {key: _RANKS.fullmatch(str(key)) for key in value} if isinstance(value, dict) else {}
    return {(int(m[1]), int(m[2])): value[key] for key, m in stated.items() if m}


def _get_tensors(values: Any) -> dict[str, GlobalTensor]:
    found = values.items() if isinstance(values, dict) else ()
    named = ((_strip(name), as_global(value)) for name, value in found)
    return {name: tensor for name, tensor in named if tensor is not None}


def _strip(name: Any) -> str:
    text = str(name)
    while text.startswith(_WRAPPER):
        text = text.removeprefix(_WRAPPER)
    return text


def _refuse_several_pieces(
    location: Location, fqns: Iterable[str], args: Arguments, table: Table
) -> None:
    """Refuse fused parameters whose parts are rank after rank, not one after the other."""
    if args.tp <= 1:
        return
    for fqn in fqns:
        rule = table.find(fqn, {})
        # Gate and up are stored apart only if they are SwiGLU's.
        if rule and (rule.rule.segments or len(rule.rule.split(gated=args.gated).parts) > 1):
            raise UnsupportedError(
                location,
                f"has {fqn!r} of {args.tp} tensor-parallel ranks in the format {FSDP_DTENSOR},"
                " which does not tell its parts from each other",
                "begin the run with one tensor-parallel rank, or without --use-megatron-fsdp",
            )


def _read_optimizer(value: Any, fqns: Iterable[str], table: Table) -> ParsedOptimizer:
    result = ParsedOptimizer()
    if not isinstance(value, dict):
        return result
    states = {_strip(name): state for name, state in _list_items(value.get("state"))}
    slots = {slot for state in states.values() for slot in state if slot != _STEP}
    for slot in sorted(slots):
        stored = _get_tensors({name: state.get(slot) for name, state in states.items()})
        kind = rank_optimizer.get_kind(slot)
        result.entries += [
            tensor.make_entry(fqn, kind) for fqn, tensor in dist.join_parts(stored, table).items()
        ]
    metas = {_strip(name): meta for name, meta in _list_items(value.get("param_to_group_meta"))}
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    with SourceFiles() as pool:
        for fqn in fqns:
            meta = metas.get(fqn, {})
            own = next((states[name] for name in _list_stored(fqn, table) if name in states), {})
            counters = (own.get(_STEP), meta.get(_STEP))
            step = next((read_counter(c, pool) for c in counters if c is not None), None)
            if step is not None:
                result.steps[fqn] = float(step)
            if meta:
                hyper = read_hyper(meta, pool, skip=[_STEP])
                groups.setdefault(repr(sorted(hyper.items())), (hyper, []))[1].append(fqn)
    result.groups = [ParamGroup(hyper, tuple(members)) for hyper, members in groups.values()]
    return result


def _list_stored(fqn: str, table: Table) -> Iterator[str]:
    """Yield the names under which a parameter, or its first part, may be stored."""
    yield fqn
    yield fqn + dist.GATE
    rule = table.find(fqn, {})
    yield from (f"{fqn}.{part}" for part in (rule.rule.segments if rule else ()))


def _list_items(values: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    if isinstance(values, dict):
        yield from ((key, value) for key, value in values.items() if isinstance(value, dict))
