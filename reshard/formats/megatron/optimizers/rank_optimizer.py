"""The optimizer of one rank: every slot by the parameter's name.

Forms: torch's own dict (fp32), the same beside fp32 masters (bf16, fp16), and flat buffers (the
distributed optimizer, see `flat_buffers`). Experts that are spread over ranks have a separate
optimizer.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/optimizer.py`` (state_dict of each class).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from reshard.core.box import Index
from reshard.core.manifest import MASTER, ParamGroup, UnnamedOptimizer
from reshard.core.schema import COUNT, expect, fields, mapping, maybe, sequence
from reshard.errors import MIXED, CorruptError
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.optimizers import groups
from reshard.formats.megatron.optimizers.buckets import Param
from reshard.formats.megatron.optimizers.frozen import (
    Ambiguous,
    ListedMasters,
    Sample,
    choose_trained,
)
from reshard.layouts.model_parallel.rules import Table
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.optimizers.hyper_parameters import read_counter, read_hyper
from reshard.state_dict.optimizers.numbering import AmbiguousError, name_groups
from reshard.state_dict.optimizers.states import MASTER_LISTS, ParsedOptimizer
from reshard.state_dict.tree import as_global, as_list
from reshard.system.files import SourceFiles
from reshard.units import counted

_STATE = fields(
    state=maybe(mapping()), param_groups=sequence(fields(params=maybe(sequence(COUNT))))
)
_FULL = "float32"
MASTERS = ("param", "fp32_param", "master_param")  # of the flat form, torch_dist, and TE's own
CHAINED = "chained"  # in a loss scaler: those of all optimizers of a chain, if they differ


@dataclass(frozen=True, slots=True)
class RankParam:
    """A parameter of a rank: its global name, local shape, dtype and model chunk."""

    fqn: str
    shape: Index
    dtype: str
    chunk: int


def get_kind(slot: str) -> str:
    """Return the manifest's kind of a slot: every copy in full precision is a master."""
    return MASTER if slot in MASTERS else slot


def divide_params(
    count: int, params: Sequence[RankParam], args: Arguments, table: Table
) -> list[list[RankParam]]:
    """Return the parameters of each of a rank's optimizers (``get_megatron_optimizer``).

    Args:
        count: number of optimizers: one, or one for dense parameters and one for experts; under
            ``--overlap-param-gather-with-optimizer-step`` the first chunk has another before them.
    """
    if count <= 1:
        return [list(params)]
    experts = [p for p in params if groups.is_expert(p.fqn, args, table)]
    dense = [p for p in params if not groups.is_expert(p.fqn, args, table)]
    if args.flag("overlap_param_gather_with_optimizer_step"):
        return [[p for p in dense if not p.chunk], [p for p in dense if p.chunk], experts][:count]
    return [dense, experts]


def _divide_among(
    states: Sequence[Any], params: Sequence[RankParam], args: Arguments, table: Table
) -> list[list[RankParam]]:
    # The experts have a Muon of their own unless layers are distributed over ranks
    # (``core/optimizer/muon.py``).
    stored = list(map(list_groups, states))
    every = list(chain(*stored))
    count = sum(groups.updates_matrices(own, every) for own in stored)
    if not count:
        return divide_params(len(states), params, args, table)
    matrices = [param for param in params if groups.is_matrix(param.fqn, param.shape)]
    others = [param for param in params if not groups.is_matrix(param.fqn, param.shape)]
    return [
        *divide_params(count, matrices, args, table),
        *divide_params(len(states) - count, others, args, table),
    ]


def list_groups(state: Any) -> list[dict[str, Any]]:
    """Return the param groups of one optimizer's state, whatever is stored there."""
    inner = state.get("optimizer", state) if isinstance(state, dict) else None
    stored = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in as_list(stored) or () if isinstance(group, dict)]


def read(
    value: Any,
    params: Sequence[RankParam],
    args: Arguments,
    table: Table,
    path: str,
    sample: Sample = lambda _fqn: (),
) -> ParsedOptimizer:
    """Return every slot, step and group of a rank, except those in flat buffers.

    Args:
        value: what is saved under ``optimizer``: a state, or several in a list or by number.
        params: the rank's parameters in the order of ``named_parameters``, chunk after chunk.
        sample: returns some elements of a parameter, by which frozen ones are told from others.

    Raises:
        CorruptError: what is stored does not fit the model.
    """
    result = ParsedOptimizer()
    states = list_states(value)
    result.scaler = _read_scalers(result, states, args)
    shares = _divide_among(states, params, args, table)
    if len(states) > len(shares):
        leave_out(result, describe_long_chain(len(states), len(shares)))
        return result
    for state, shared in zip(states, shares, strict=False):
        if not isinstance(state, dict):
            continue
        inner = state.get("optimizer", state.get("optimizer_state_dict", state))
        if inner is None:
            continue
        expect(path, inner, _STATE, "optimizer")
        masters = _list_masters(state)
        members = _read_groups(result, inner, shared, args, table, masters, sample)
        _read_steps(result, inner, members)
        _read_indexed(result, inner, members)
        _read_masters(result, masters, shared, members, path)
    return result


def describe_long_chain(count: int, known: int) -> str:
    """Return why the states of a chain of optimizers cannot be divided among the parameters."""
    return (
        f"it is a chain of {count} optimizers, and reshard knows how Megatron divides the"
        f" parameters among {known}"
    )


def leave_out(result: ParsedOptimizer, reason: str) -> None:
    """Note that the states of an optimizer are left out, because nothing tells whose they are."""
    result.notes.append(f"the optimizer is left out: {reason}")
    result.unnamed_optimizers = ("optimizer",)
    result.why_unnamed = UnnamedOptimizer(
        reason, advice="save it once with --ckpt-format torch_dist, which names each state"
    )


def _read_scalers(
    result: ParsedOptimizer, states: Sequence[Any], args: Arguments
) -> dict[str, Any] | None:
    # Each optimizer of a chain lowers its own scale where its own gradients overflow
    # (``core/optimizer/optimizer.py``, ChainedOptimizer.prepare_grads). The first scales the loss.
    found = [
        _read_scaler(state.get("grad_scaler"), args) for state in states if isinstance(state, dict)
    ]
    first = next(filter(None, found), None)
    if first is None or all(scaler == first for scaler in found):
        return first
    scales = " and ".join(f"{scaler['scale']:g}" for scaler in found if scaler)
    result.notes.append(
        f"the optimizers of the dense parameters and of the experts have different loss scalers"
        f" (scales {scales}): Megatron scales the loss by the first, and divides the gradients of"
        " each by its own"
    )
    return {**first, CHAINED: found}


def _read_scaler(state: Any, args: Arguments) -> dict[str, Any] | None:
    # ``core/optimizer/grad_scaler.py`` (DynamicGradScaler), ``training/arguments.py``.
    if not isinstance(state, dict) or "scale" not in state:
        return None
    with SourceFiles() as pool:
        return {
            "scale": read_counter(state["scale"], pool),
            # get_megatron_optimizer passes these two factors as constants; no argument states them.
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": args.number("loss_scale_window", default=1000),
            "_growth_tracker": state.get("growth_tracker", 0),
            "hysteresis_tracker": state.get("hysteresis_tracker", 1),
        }


def list_states(value: Any) -> list[Any]:
    """Return the states of a chain of optimizers, or of the only one."""
    states = as_list(value)
    return [value] if states is None else states


def _read_groups(
    result: ParsedOptimizer,
    inner: Mapping[str, Any],
    params: Sequence[RankParam],
    args: Arguments,
    table: Table,
    masters: Sequence[Sequence[GlobalTensor]],
    sample: Sample,
) -> list[list[str | None]]:
    stored: list[dict[str, Any]] = list(inner.get("param_groups", []))
    shapes = {param.fqn: param.shape for param in params}
    assigned = groups.assign_members(stored, shapes, args, table)
    listed: list[list[str | None]] = [list(fqns) for fqns in assigned]
    counts = [len(group["params"]) for group in stored if group.get("params") is not None]
    # torch_dist saves groups without ``params``; there Megatron's own rule has to be enough.
    if counts and counts != list(map(len, listed)):
        by_value = _match_by_value(assigned, counts, shapes, masters, sample)
        listed = by_value or _match_by_shape(result, inner, stored, shapes, assigned)
    if not counts and (reason := groups.explain_unassigned(stored, shapes, args, table)):
        result.notes.append(f"the param groups are left out: {reason}")
        return listed
    for group, fqns in zip(stored, listed, strict=False):
        own = tuple(fqn for fqn in fqns if fqn is not None)
        result.groups.append(ParamGroup(read_hyper(group, skip=["step"]), own))
    return listed


def _match_by_value(
    assigned: Sequence[Sequence[str]],
    counts: Sequence[int],
    shapes: Mapping[str, Index],
    masters: Sequence[Sequence[GlobalTensor]],
    sample: Sample,
) -> list[list[str | None]] | None:
    """Return the members of groups that lack parameters, if the values of their masters tell."""
    if not len(assigned) == len(counts) == len(masters):
        return None
    listed: list[list[str | None]] = []
    with SourceFiles() as files, suppress(Ambiguous):
        for fqns, count, tensors in zip(assigned, counts, masters, strict=True):
            params = [Param(fqn, shapes[fqn]) for fqn in fqns]
            trained = choose_trained(params, ListedMasters(tensors, files), sample)
            if len(trained) != count:
                return None
            listed.append([param.fqn for param in trained])
    return listed if len(listed) == len(assigned) else None


def _match_by_shape(
    result: ParsedOptimizer,
    inner: Mapping[str, Any],
    stored: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Index],
    assigned: Sequence[Sequence[str]],
) -> list[list[str | None]]:
    """Return the members of groups that lack parameters, if order and shapes identify them."""
    state = inner.get("state") or {}
    signatures = [[_get_shape(state.get(i)) for i in group.get("params") or ()] for group in stored]
    kept = [_match_in_order(*pair, shapes) for pair in zip(assigned, signatures, strict=True)]
    if all(group is not None for group in kept):
        return [list[str | None](group) for group in kept if group is not None]
    try:
        return name_groups(shapes, signatures)
    except AmbiguousError as error:
        sizes = ", ".join(str(len(group)) for group in signatures)
        leave_out(
            result,
            f"its groups of {sizes} parameters are not those that Megatron makes of this model, and"
            f" {error}",
        )
        return []


def _match_in_order(
    fqns: Sequence[str], wanted: Sequence[Index | None], shapes: Mapping[str, Index]
) -> list[str] | None:
    """Return the parameters with these shapes, in this order; None if there is not exactly one way.

    >>> shapes = {"a": (1,), "b": (2,), "c": (1,)}
    >>> _match_in_order(["a", "b", "c"], [(2,), (1,)], shapes)
    ['b', 'c']
    >>> _match_in_order(["a", "b", "c"], [(1,)], shapes)
    """

    def match(fqns: Iterable[str], wanted: Iterable[Index | None]) -> list[str] | None:
        rest = iter(fqns)
        found = [next((f for f in rest if shapes[f] == shape), None) for shape in wanted]
        return [fqn for fqn in found if fqn is not None] if None not in found else None

    first, last = match(fqns, wanted), match(reversed(fqns), reversed(wanted))
    # The first match from the front and that from the back are equal only if there is one match.
    return first if last is not None and first == last[::-1] else None


def _get_shape(state: Any) -> Index | None:
    if not isinstance(state, dict):
        return None
    shapes = [tensor.shape for value in state.values() if (tensor := as_global(value))]
    # A counter of steps may be a tensor too; the moments have the most dims.
    return max(shapes, key=lambda shape: (len(shape), prod(shape)), default=None)


def _read_steps(
    result: ParsedOptimizer, inner: Mapping[str, Any], members: Sequence[Sequence[str | None]]
) -> None:
    # torch's Adam counts updates for each parameter, the fused ones for each group; torch_dist has
    # one for all (``common_step``).
    state = inner.get("state") or {}
    index = 0
    with SourceFiles() as pool:
        for group, fqns in zip(inner.get("param_groups", []), members, strict=False):
            for fqn in fqns:
                own = state.get(index)
                counters = (
                    own.get("step") if isinstance(own, dict) else None,
                    group.get("step"),
                    state.get("common_step"),
                )
                step = next((read_counter(c, pool) for c in counters if c is not None), None)
                if fqn is not None and step is not None:
                    result.steps[fqn] = float(step)
                index += 1


def _read_indexed(
    result: ParsedOptimizer, inner: Mapping[str, Any], members: Sequence[Sequence[str | None]]
) -> None:
    """Read the slots under the parameters' numbers, which run through the groups."""
    state = inner.get("state") or {}
    fqns = [fqn for group in members for fqn in group]
    for index, slots in state.items():
        known = isinstance(index, int) and isinstance(slots, dict) and 0 <= index < len(fqns)
        fqn = fqns[index] if known else None
        if fqn is None:
            continue
        for slot, value in slots.items():
            tensor = as_global(value)
            if tensor is not None and slot != "step":
                result.entries.append(tensor.make_entry(fqn, get_kind(slot)))


def _list_masters(state: Mapping[str, Any]) -> list[list[GlobalTensor]]:
    lists = next((state[key] for key in MASTER_LISTS if key in state), None)
    if not isinstance(lists, list):
        return []
    return [
        [tensor for value in as_list(own) or () if (tensor := as_global(value))] for own in lists
    ]


def _read_masters(
    result: ParsedOptimizer,
    masters: Sequence[Sequence[GlobalTensor]],
    params: Sequence[RankParam],
    members: Sequence[Sequence[str | None]],
    path: str,
) -> None:
    if not members or not masters:
        return
    if len(masters) != len(members):
        raise CorruptError(
            path,
            f"has fp32 copies of {len(masters)} param groups, but {len(members)} groups",
            MIXED,
        )
    dtypes = {param.fqn: param.dtype for param in params}
    for fqns, copies in zip(members, masters, strict=True):
        half = [fqn for fqn in fqns if fqn is not None and dtypes[fqn] != _FULL]
        if copies and len(half) != len(copies):
            raise CorruptError(
                path,
                f"has {len(copies)} fp32 copies for a param group of {len(half)} 16-bit parameters",
                MIXED,
            )
        pairs = zip(half, copies, strict=False)  # no copies: the fp32 parameters are the masters
        result.entries += [copy.make_entry(fqn, MASTER) for fqn, copy in pairs]


def note_frozen(fqns: Sequence[str]) -> Iterator[str]:
    """Yield a note on parameters that no optimizer has."""
    if fqns:
        yield f"{counted(len(fqns), 'parameter')} without optimizer state, e.g. {fqns[0]}: frozen"
