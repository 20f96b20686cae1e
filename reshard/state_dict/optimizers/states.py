"""Read optimizer state dicts in every keying: by fqn or by index, nested or flattened.

Sources: torch 2.13 ``optim/optimizer.py`` (``state_dict``), ``distributed/fsdp/_optim_utils.py``
(full, sharded and raw forms), ``distributed/checkpoint/state_dict.py``
(``flatten_optimizer_state_dict``).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from reshard.containers.torch_objects import read_number
from reshard.core import counts
from reshard.core.box import Index
from reshard.core.keys import remove_wrappers
from reshard.core.manifest import MASTER, Entry, Keyed, ParamGroup, UnnamedOptimizer
from reshard.errors import MIXED, CorruptError, UnsupportedError, shown
from reshard.quantised import moments
from reshard.state_dict import flat_params
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.optimizers import nested_slots
from reshard.state_dict.optimizers.hyper_parameters import read_counter, read_hyper
from reshard.state_dict.optimizers.layouts import (
    KnownParameters,
    Slots,
    WholeLayout,
    fits_live_order,
    identify_layout,
    infer_shape,
    select_tensors,
)
from reshard.state_dict.optimizers.numbering import (
    AmbiguousError,
    MoreParametersError,
    UnknownShapeError,
    match_live_groups,
    may_be_divided_by_decay,
)
from reshard.state_dict.plain_values import to_plain
from reshard.state_dict.tree import LocalTensors, as_global, as_list, is_tensor
from reshard.system.files import SourceFiles
from reshard.training import optimizers
from reshard.units import abridge, counted

_STATE, _GROUPS = "state", "param_groups"
_ASK = " (pass --model config.json|DIR|module:factory to name its parameters)"
_WRAP = "if the run had flat parameters (FSDP 1), pass --wrap, too"
_JOINT = UnnamedOptimizer(
    "LBFGS keeps one state for all parameters together, which reshard does not convert",
    advice="resume from the source itself",
)
_GROUPS_BY_NAMES = UnnamedOptimizer(
    "its param_groups are a dict and not a list, as in the distributed_state_dict of Distributed"
    " Shampoo, which reshard does not convert",
    advice="resume from the source itself",
)
# Names beside the state dict of an optimizer of 16-bit parameters, whose fp32 masters are a list:
# Megatron's (one for each param group), that of apex and of Megatron until 2020, and SpecForge's
# (one for all groups).
MASTER_LISTS = ("fp32_from_fp16_params", "fp32_from_fp16", "fp32_params")
_TWO_ORDERS = (
    "the optimizer is stored by index, and its shapes fit the order of the model and that of the"
    " live optimizer: it is read in the model's order. If the run that saved had the order of the"
    " live optimizer, load its files without reshard"
)
_FAIRSCALE = "param_id_map"  # FairScale's consolidated form numbers parameters by unit


@dataclass(slots=True)
class ParsedOptimizer:
    """The content of an optimizer's files, by fqn."""

    entries: list[Entry] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    step_files: dict[str, str] = field(default_factory=dict)  # fqn -> the only file of its step
    groups: list[ParamGroup] = field(default_factory=list)
    non_tensor_state: dict[str, Any] = field(default_factory=dict)  # by fqn
    notes: list[str] = field(default_factory=list)
    unnamed_optimizers: tuple[str, ...] = ()  # optimizers left out, whose states have no names
    why_unnamed: UnnamedOptimizer | None = None  # why its numbered parameters have no names
    scaler: Any = None  # the loss scaler, if the optimizer saves it


def is_optimizer(value: Any) -> bool:
    """Return whether a value has the form of an optimizer's state dict."""
    if not isinstance(value, dict) or not value:
        return False
    if _GROUPS in value and isinstance(value.get(_STATE, {}), dict):
        groups = _list_groups(value)
        return groups is not None and all(isinstance(group, dict) for group in groups)
    return all(
        isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in value
    )


def _has_groups_by_names(value: Mapping[str, Any]) -> bool:
    # Source: facebookresearch/optimizers ``distributed_shampoo.py`` (``distributed_state_dict``).
    return bool(value.get(_STATE)) and isinstance(value.get(_GROUPS), dict)


def _list_groups(value: Mapping[str, Any]) -> Sequence[Any] | None:
    groups = value[_GROUPS]
    return list(groups.values()) if _has_groups_by_names(value) else as_list(groups)


def collect_shapes(value: Any) -> dict[str, Index]:
    """Return the shapes of the parameters that an optimizer names and has state for.

    They are in the order of its param groups, which is that of the parameters in their flat unit.
    """
    state, groups = _normalize(value)
    order = [key for group in groups for key in _list_members(group)]
    shapes = {}
    for key in dict.fromkeys([*order, *state]):
        sign = infer_shape(state.get(key, {}))
        if isinstance(key, str) and not key.isdecimal() and sign:
            shapes[key] = sign
    return shapes


def is_numbered(value: Any) -> bool:
    """Return whether an optimizer numbers its parameters and stores no names."""
    state, groups = _normalize(value)
    keys = _list_keys(state, groups)
    return any(isinstance(key, int) for key in keys) and not _read_stored_names(groups)


def count_parameters(value: Any) -> int:
    """Return how many parameters the param groups of an optimizer list."""
    return sum(len(_list_members(group)) for group in _normalize(value)[1])


def find_keying(values: Iterable[Any]) -> Keyed | None:
    """Return how optimizers identify their parameters; None if there are none, or they differ."""
    kinds: set[Keyed] = set()
    for value in values:
        state, groups = _normalize(value)
        keys = _list_keys(state, groups)
        kinds.update("index" if isinstance(key, int) else "fqn" for key in keys)
    return kinds.pop() if len(kinds) == 1 else None


def has_state(value: Any) -> bool:
    """Return whether an optimizer has made an update and keeps state of it."""
    return any(map(select_tensors, _normalize(value)[0].values()))


def collect_names(value: Any) -> set[str]:
    """Return the fqns that an optimizer stores itself."""
    state, groups = _normalize(value)
    keys = {key for group in groups for key in _list_members(group)} | state.keys()
    return {key for key in keys if isinstance(key, str)} | set(_read_stored_names(groups).values())


def read(value: Any, known: KnownParameters, pool: SourceFiles) -> ParsedOptimizer:
    """Read every slot, step and group of one optimizer.

    State whose parameter is unknown is left out with a note; it is never guessed.
    """
    state, groups = _normalize(value)
    # A flattened state dict has a group for each parameter, even if the optimizer had only one.
    groups = groups if _GROUPS in value else _merge_equal_groups(groups, pool)
    if _FAIRSCALE in value:
        known = replace(known, ordered=False)
    parsed = ParsedOptimizer()
    unread = _JOINT if any(map(optimizers.has_joint_state, groups)) else _find_odd_form(value)
    unread = unread or _find_partial_codes(state, known.shapes)
    if unread is not None:
        parsed.why_unnamed = unread
        parsed.notes.append(f"the optimizer is left out: {unread.reason}")
        parsed.groups += [ParamGroup(read_hyper(group, pool), ()) for group in groups]
        return parsed
    keys = _list_keys(state, groups)
    _refuse_unlisted(state, keys, known)
    if all(isinstance(key, str) and not key.isdecimal() for key in [*keys, *state]):
        owned = _add_states(
            parsed, state, {key: key for key in [*keys, *state]}, WholeLayout(known), pool
        )
    else:
        owned = _add_numbered(parsed, state, groups, known, pool)
    decoded = {entry.fqn for entry in parsed.entries if moments.is_decoded(entry)}
    if decoded:
        what = f"the state of {counted(len(decoded), 'parameter')}"
        parsed.notes.append(moments.describe_decoded(what, "torchao"))
    unnamed = 0
    listed = set(keys)
    if len(groups) == 1 and (lost := [key for key in owned if key not in listed]):
        groups = [{**groups[0], "params": [*_list_members(groups[0]), *lost]}]
        parsed.notes.append(
            f"{len(lost)} parameters with state are not listed in the only param group (DCP keeps"
            " one pipeline stage's list): they are added to it"
        )
    for group in groups:
        members = [owned.get(key, ()) for key in _list_members(group)]
        unnamed += members.count(())
        fqns = tuple(fqn for names in members for fqn in names)
        parsed.groups.append(ParamGroup(read_hyper(group, pool), fqns))
    if unnamed and owned:
        parsed.notes.append(
            f"{unnamed} parameters without state (never stepped) cannot be named by their index:"
            " they are in no param group"
        )
    return parsed


def _refuse_unlisted(
    state: Mapping[Any, Slots], keys: Sequence[Any], known: KnownParameters
) -> None:
    # torch numbers the members of the groups, so that each number with a state is one of them. Of
    # names DCP keeps one pipeline stage's list; there a group also has to list a name that no
    # weight has.
    listed = set(keys)
    lost = [key for key in state if key not in listed]
    strange = [key for key in listed if isinstance(key, str) and key not in known.shapes]
    wrong = [key for key in lost if isinstance(key, int) or (strange and key in known.shapes)]
    if not wrong:
        return
    tensors = map(as_global, state[wrong[0]].values())
    chunks = (chunk for tensor in tensors if tensor is not None for chunk in tensor.chunks)
    file = next((chunk.file for chunk in chunks), "the optimizer")
    others = f", and one lists {shown(min(strange))}, which is no weight" if strange else ""
    raise CorruptError(
        file, f"has the state of parameter {wrong[0]!r}, which no param group lists{others}", MIXED
    )


def join(values: Iterable[Mapping[str, Any]], pool: SourceFiles) -> dict[str, Any]:
    """Return numbered optimizers as one, which has the param groups of all."""
    joined: dict[Any, Slots] = {}
    all_groups: list[dict[str, Any]] = []
    shift = 0
    for value in values:
        state, groups = _normalize(value)
        groups = groups if _GROUPS in value else _merge_equal_groups(groups, pool)
        all_groups += [
            {**group, "params": [key + shift for key in _list_members(group)]} for group in groups
        ]
        joined |= {key + shift: slots for key, slots in state.items()}
        shift += 1 + max([*state, *_list_keys(state, groups)], default=-1)
    return {_STATE: joined, _GROUPS: all_groups}


def can_be_joined(value: Mapping[str, Any]) -> bool:
    """Return whether `join` knows the form of an optimizer, which has numbers alone."""
    state, groups = _normalize(value)
    keys = [*state, *_list_keys(state, groups)]
    is_plain = _FAIRSCALE not in value and _find_odd_form(value) is None
    is_plain = is_plain and not any(map(optimizers.has_joint_state, groups))
    return is_plain and is_numbered(value) and all(isinstance(key, int) for key in keys)


def add_masters(value: Mapping[str, Any], masters: Any) -> dict[str, Any] | None:
    """Return an optimizer's state dict with the fp32 master of each parameter as one of its slots.

    Args:
        masters: a list of all groups, or a list for each group.

    Returns:
        None if the lists are not those of all parameters: some may have no master.
    """
    state, groups = _normalize(value)
    listed = as_list(masters) or []
    own = [as_list(part) for part in listed if not is_tensor(part)]
    if own and (len(own) != len(listed) or len(own) != len(groups) or None in own):
        return None
    members = [_list_members(group) for group in groups]
    if own and list(map(len, members)) != [len(part or ()) for part in own]:
        return None
    keys = [key for part in members for key in part]
    tensors = [tensor for part in own for tensor in part or ()] if own else listed
    if not keys or len(keys) != len(tensors) or not all(map(is_tensor, tensors)):
        return None
    added: dict[Any, Slots] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        shape, master = infer_shape(state.get(key, {})), as_global(tensor)
        if shape is not None and master is not None and master.shape != shape:
            return None
        added[key] = {**state.get(key, {}), MASTER: tensor}
    return {_STATE: {**state, **added}, _GROUPS: groups}


def _normalize(value: Mapping[str, Any]) -> tuple[dict[Any, Slots], list[dict[str, Any]]]:
    if _GROUPS in value:
        state = {
            _parse_key(key): nested_slots.flatten(slots, is_tensor)
            for key, slots in value.get(_STATE, {}).items()
            if isinstance(slots, dict)
        }
        groups = [
            {**group, "params": [_parse_key(key) for key in as_list(group.get("params")) or ()]}
            for group in _list_groups(value) or ()
        ]
        return state, groups
    return _unflatten(value)


def _find_odd_form(value: Mapping[str, Any]) -> UnnamedOptimizer | None:
    if _has_groups_by_names(value):
        return _GROUPS_BY_NAMES
    states = value.get(_STATE, {}).items()
    odd = next((item for item in states if item[1] and not isinstance(item[1], dict)), None)
    if odd is None:
        return None
    reason = f"it keeps the state of parameter {odd[0]} as {shown(odd[1])}, not as a dict of slots"
    return UnnamedOptimizer(reason, advice="resume from the source itself")


def _find_partial_codes(
    state: Mapping[Any, Slots], shapes: Mapping[str, Index]
) -> UnnamedOptimizer | None:
    # bitsandbytes 0.49 hides its tensors from FSDP in a dict, which ``FSDP.optim_state_dict``
    # copies from the first rank's part of a unit to each parameter of the unit.
    for key, slots in state.items():
        held = infer_shape(slots) if optimizers.is_of_bitsandbytes(slots) else None
        shape = shapes.get(key) if isinstance(key, str) else None
        if held is not None and shape is not None and prod(held) != prod(shape):
            reason = (
                f"it has bitsandbytes' state of {prod(held)} elements for {key!r}, which has"
                f" {prod(shape)}: FSDP 1 saves such state of the first rank alone"
            )
            return UnnamedOptimizer(reason, advice="start a new Adam: --init-optimizer zeros")
    return None


def _parse_key(key: Any) -> Any:
    """Return a key as an index or a name; DCP turns an index into text."""
    if isinstance(key, str):
        number = counts.parse_index(key)
        return key if number is None else number
    return key if type(key) is int else shown(key)


def _unflatten(value: Mapping[str, Any]) -> tuple[dict[Any, Slots], list[dict[str, Any]]]:
    # Keys are ``state.<fqn>.<slot>`` and ``param_groups.<fqn>.<hyper-parameter>``. A program that
    # flattens the nested state dict has the number of a group for ``<fqn>``, and its ``params``.
    state: dict[Any, Slots] = {}
    hypers: dict[str, dict[str, Any]] = {}
    # Names of parameters and slots may have dots; the groups, read first, show where a name ends.
    for key, item in value.items():
        part, _, rest = key.partition(".")
        if part != _STATE:
            fqn, _, name = rest.rpartition(".")
            hypers.setdefault(fqn, {})[name] = item
    for key, item in value.items():
        part, _, rest = key.partition(".")
        if part == _STATE:
            fqn, name = _split_owner(rest, hypers)
            state.setdefault(fqn, {}).update(nested_slots.flatten({name: item}, is_tensor))
    return state, [{"params": [fqn], **hyper} for fqn, hyper in hypers.items()]


def _merge_equal_groups(
    groups: Sequence[dict[str, Any]], pool: SourceFiles
) -> list[dict[str, Any]]:
    # Pairs of a merged group and the hyper-parameters that its members share.
    merged: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in groups:
        hyper = read_hyper(group, pool)
        same = next((kept for kept, others in merged if others == hyper), None)
        if same is None:
            merged.append(({**group, "params": _list_members(group)}, hyper))
        else:
            same["params"] += _list_members(group)
    return [kept for kept, _ in merged]


def _split_owner(rest: str, fqns: Container[str]) -> tuple[str, str]:
    """Split ``<fqn>.<slot>``; a nested slot has further names behind its own."""
    fqn, _, name = rest.rpartition(".")
    above, below = fqn, name
    while above:
        if above in fqns:
            return above, below
        above, _, part = above.rpartition(".")
        below = f"{part}{nested_slots.JOINT}{below}"
    return fqn, name


def _list_members(group: Mapping[str, Any]) -> list[Any]:
    return list(group.get("params") or ())


def _list_keys(state: Iterable[Any], groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [key for group in groups for key in _list_members(group)] or list(state)


def _read_step(fqn: str, slots: Slots, pool: SourceFiles) -> float | None:
    # Adagrad has a state before its first update, and makes none on a rank without elements.
    value = slots.get("step")
    if not isinstance(value, LocalTensors):
        return read_counter(value, pool)
    tensors = [slot for slot in slots.values() if isinstance(slot, LocalTensors)]
    empty = {
        rank for slot in tensors for rank, chunk in slot.pieces.items() if not chunk.box.volume
    }
    pieces = value.pieces.items()
    chunks = [chunk for rank, chunk in pieces if chunk.box.volume == 1 and rank not in empty]
    try:
        counted = {chunk.file: read_number(pool, chunk) for chunk in chunks}
    except UnsupportedError:  # a dtype that no counter has
        return None
    if not counted:
        return None
    first, step = next(iter(counted.items()))
    for file, other in counted.items():
        if other != step and str(other) != str(step):  # no NaN is equal to another
            raise CorruptError(
                file, f"the optimizer's step of {fqn!r} is {other}, but {step} in {first}", MIXED
            )
    return float(step)


def _add_states(
    parsed: ParsedOptimizer,
    state: Mapping[Any, Slots],
    names: Mapping[Any, Any],
    layout: WholeLayout,
    pool: SourceFiles,
) -> dict[Any, tuple[str, ...]]:
    for key, slots in state.items():
        owner = names.get(key)
        if owner is not None:
            for name, value in select_tensors(slots).items():
                parsed.entries += layout.build_entries(owner, name, value)
            _add_non_tensor_state(parsed, layout.list_fqns(owner), slots, pool)
    return {
        key: tuple(layout.list_fqns(owner)) for key, owner in names.items() if owner is not None
    }


def _add_non_tensor_state(
    parsed: ParsedOptimizer, fqns: Sequence[str], slots: Slots, pool: SourceFiles
) -> None:
    step = _read_step(fqns[0] if fqns else "", slots, pool)
    other = {k: to_plain(v) for k, v in slots.items() if k != "step" and not is_tensor(v)}
    for fqn in fqns:
        if step is not None:
            parsed.steps[fqn] = step
            if isinstance(stored := slots.get("step"), GlobalTensor):
                parsed.step_files[fqn] = stored.chunks[0].file
        if other:
            parsed.non_tensor_state[fqn] = other


def _add_numbered(
    parsed: ParsedOptimizer,
    state: Mapping[Any, Slots],
    groups: Sequence[Mapping[str, Any]],
    known: KnownParameters,
    pool: SourceFiles,
) -> dict[Any, tuple[str, ...]]:
    stored = _name_as_weights(_read_stored_names(groups, known.shapes), known.shapes)
    if not may_be_divided_by_decay(groups):
        known = replace(known, divisions=())
    if stored:
        known = replace(
            known, shapes={n: s for n, s in known.shapes.items() if n in stored.values()}
        )
    try:
        if known.others and not stored:
            raise MoreParametersError(
                "it may have the parameters of other modules, whose weights were not read:"
                f" {abridge(known.others)}"
            )
        members = [_list_members(group) for group in groups] or [list(state)]
        if known.live:
            sizes = list(map(len, members))
            live = match_live_groups(groups, sizes, known.live, known.shapes)
            known = replace(known, live=live)
        layout, names = identify_layout(state, members, known, stored)
    except AmbiguousError as reason:
        misfit = isinstance(reason, UnknownShapeError)
        wrap = _WRAP if misfit and known.model and not (known.units or reason.advice) else ""
        advice = reason.advice or wrap or known.missing
        parsed.why_unnamed = UnnamedOptimizer(str(reason), known.model, advice, misfit)
        ask = f" ({wrap or known.missing})" if wrap or known.missing else _ASK
        advice = "" if (known.model and not wrap) or reason.advice else ask
        parsed.notes.append(
            f"the optimizer is stored by index, and {reason}; it is left out{advice}"
        )
        return {}
    if not stored and fits_live_order(state, members, known, names):
        parsed.notes.append(_TWO_ORDERS)
    return _add_states(parsed, state, names, layout, pool)


def _name_as_weights(stored: Mapping[Any, str], weights: Collection[str]) -> dict[Any, str]:
    # An optimizer that was made of the ``named_parameters()`` of FSDP 1, or of a model with
    # activation checkpointing, stores prefixes of wrappers, which the ``state_dict()`` leaves out.
    bare = {remove_wrappers(fqn): fqn for fqn in weights}
    if len(bare) < len(weights):
        return dict(stored)
    return {key: bare.get(remove_wrappers(fqn), fqn) for key, fqn in stored.items()}


def _read_stored_names(
    groups: Sequence[Mapping[str, Any]], weights: Container[Any] = ()
) -> dict[Any, str]:
    # ``param_names`` has the names (torch >= 2.6), or the name of a group of one parameter
    # (Adam-mini), which may be that of a group: so it has to be among the ``weights``. Those of
    # FSDP 1's flat parameters name no weights.
    names: dict[Any, str] = {}
    for group in groups:
        given = as_list(group.get("param_names"))
        if not given and group.get("name") in weights:
            given = [group["name"]]
        if not given or len(given) != len(_list_members(group)):
            return {}
        names.update(zip(_list_members(group), map(str, given), strict=True))
    is_flat = any(flat_params.parse_prefix(fqn) is not None for fqn in names.values())
    return {} if is_flat else names
