"""Read the optimizer of stage 0: whole tensors under an index instead of a name.

fp32: torch's own optimizer dict. bf16 and fp16 (DeepSpeed 0.19.8 ``runtime/fp16/
unfused_optimizer.py``, ``fused_optimizer.py``): fp32 copies of each group, whole (``fp32_groups``)
or flat (``fp32_groups_flat``), and a state by index over the groups.

No file names the indices. `numbering` finds the names where it can; otherwise the optimizer
is left out, with a warning.

`_name_fused_groups` finds the members of a fused optimizer's flat tensors. ``FP16_Optimizer`` joins
the masters of each param group and names none. The sizes show which shapes a group has, if all
parameters of one shape are in one group; inside a group the parameters are in the order in which
the user gave them, which is nearly always the model's. To be sure, each weight is compared with its
master at its beginning, middle and end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import isclose, prod
from typing import Any

from reshard.containers.torch_objects import Tensor, read_weight
from reshard.core.box import Index
from reshard.core.manifest import MASTER, Entry, ParamGroup, UnnamedOptimizer
from reshard.errors import SAVE_NAMES, CorruptError
from reshard.formats.deepspeed.experts.layout import has_experts, parse_expert_name
from reshard.formats.deepspeed.flat_groups import FlatGroup
from reshard.formats.deepspeed.flat_order import find_shape_sorted_groups
from reshard.formats.deepspeed.states import (
    ModelStates,
    describe_lost_state,
    flatten_state,
    make_whole_entry,
    select_common_state,
    select_flat_slots,
)
from reshard.formats.deepspeed.train_state import (
    OptimizerContent,
    find_step,
    read_number,
    read_train_state,
)
from reshard.model.weight_decay import Division, FindDivisions, find_no_divisions
from reshard.state_dict.optimizers import nested_slots
from reshard.state_dict.optimizers.hyper_parameters import read_hyper
from reshard.state_dict.optimizers.numbering import (
    AmbiguousError,
    Signature,
    may_be_divided_by_decay,
    name_divided,
    name_groups,
)
from reshard.system.files import SourceFiles
from reshard.training import optimizers

_Names = list[list[str | None]]  # for each group its members; None for one that has no name

# Limits of the search for the members of fused groups.
_MOST_SHAPES = 200  # no known model has more; each shape is one level of recursion
_MOST_STEPS = 100_000
_MOST_ASSIGNMENTS = 100
_SAMPLES = 32  # elements of a weight that are compared with those of a master
_REL, _ABS = 2**-8, 2**-24  # half a unit of bfloat16's last place; float16's smallest number


def read(
    first: ModelStates, tied: Mapping[str, str], find_divisions: FindDivisions = find_no_divisions
) -> OptimizerContent:
    """Read the optimizer that the model states hold; there may be none.

    Args:
        tied: alias -> the name that is kept.

    Raises:
        CorruptError: a flat tensor is not as long as its parameters.
    """
    wrapper = first.get_section("optimizer")
    stored = unwrap_optimizer(wrapper).get("param_groups", [])
    warnings: list[str] = []
    names: _Names = []
    unnamed: UnnamedOptimizer | None = None
    if wrapper:
        try:
            candidates = _list_candidates(first, tied, _infer_member_shapes(wrapper))
            names = _name_members(first, candidates, find_divisions)
        except AmbiguousError as reason:
            unnamed = UnnamedOptimizer(str(reason), advice=SAVE_NAMES)
            warnings.append(
                f"stage 0 stores its optimizer by index, and {reason}; fp32 masters and moments are"
                " left out"
            )
    groups = [
        ParamGroup(read_hyper(group), tuple(fqn for fqn in fqns if fqn is not None))
        for group, fqns in zip(stored, names or [[] for _ in stored], strict=False)
    ]
    stateless = sum(fqn is None for fqns in names for fqn in fqns)
    if stateless:
        warnings.append(
            f"{stateless} parameters without state (never stepped, or empty) cannot be named by"
            " their index: they are in no param group here"
        )
    states = _pair_states(wrapper, names)
    unread = [(fqns, state, _find_unread(wrapper, fqns, state)) for fqns, state in states]
    if common := select_common_state(unwrap_optimizer(wrapper)):
        unread.append(([fqn for fqns in names for fqn in fqns], common, set(common)))
    warnings += warn_unread({name for _, _, slots in unread for name in slots})
    steps = _read_steps(first, states)
    train = read_train_state(first, groups=groups, steps=steps, optimizer_root=wrapper)
    train = replace(
        train,
        non_tensor_state=describe_lost_state(
            ([fqn for fqn in fqns if fqn is not None], state, slots)
            for fqns, state, slots in unread
        ),
    )
    entries = list(_read_entries(first, names, states))
    return OptimizerContent(0, entries, train, warnings, unnamed=unnamed)


def _list_candidates(
    first: ModelStates, tied: Mapping[str, str], shapes: Sequence[Sequence[Signature]]
) -> dict[str, Index]:
    # A parameter without elements has a state only if its optimizer gives it a gradient, as Muon
    # does.
    stated = {shape for group in shapes for shape in group}
    return {
        name: tensor.shape
        for name, tensor in first.module.items()
        if name not in first.buffers
        and name not in tied
        and (tensor.numel or tensor.shape in stated)
    }


def unwrap_optimizer(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return torch's state dict of an optimizer, which 16-bit training wraps."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return inner if isinstance(inner, dict) else {}


def warn_unread(names: Collection[str]) -> list[str]:
    """Return a warning for each part of an optimizer's state that is not read."""
    return [f"optimizer state {n!r} is not per element and is left out" for n in sorted(names)]


def _name_members(
    model: ModelStates, candidates: Mapping[str, Index], find_divisions: FindDivisions
) -> _Names:
    try:
        return _name_by_shapes(model, candidates, find_divisions)
    except AmbiguousError:
        names = _name_by_masters(model, candidates)
        if names is None:
            raise
        return names


def _name_by_masters(model: ModelStates, candidates: Mapping[str, Index]) -> _Names | None:
    # The true weight always agrees with its master, so the only one that does is the true one. A
    # master may agree with several, such as norms that were never updated.
    groups = model.get_section("optimizer").get("fp32_groups") or []
    module = model.module
    named: _Names = []
    with SourceFiles() as files:
        samples = {fqn: _read_samples(files, module[fqn]) for fqn in candidates}
        by_shape = _group_by_shape(candidates)
        for group in groups:
            members: list[str | None] = []
            for master in group:
                values = _read_samples(files, master)
                fitting = (
                    fqn
                    for fqn in by_shape.get(master.shape, ())
                    if all(map(_is_rounded, samples[fqn], values))
                )
                found = list(islice(fitting, 2))
                if len(found) != 1:
                    return None
                members += found
            named.append(members)
    flat = [fqn for members in named for fqn in members]
    return named if flat and len(set(flat)) == len(flat) else None


def _read_samples(files: SourceFiles, tensor: Tensor) -> list[float]:
    last, count = tensor.numel - 1, min(tensor.numel, _SAMPLES)
    positions = [last * number // max(count - 1, 1) for number in range(count)]
    return [read_weight(files, tensor.chunk, at) for at in positions]


def _is_rounded(weight: float, master: float) -> bool:
    return isclose(weight, master, rel_tol=_REL, abs_tol=_ABS)


def _name_by_shapes(
    model: ModelStates, candidates: Mapping[str, Index], find_divisions: FindDivisions
) -> _Names:
    declared = _read_declared_names(model, candidates)
    if declared:
        return declared
    wrapper = model.get_section("optimizer")
    groups = unwrap_optimizer(wrapper).get("param_groups", [])
    flats = wrapper.get("fp32_groups_flat")
    of_experts = [has_experts(group) for group in groups]
    if any(of_experts):
        return _name_expert_groups(candidates, _infer_member_shapes(wrapper), of_experts, groups)
    if flats:
        return [[*names] for names in _name_fused_groups(model, candidates, flats)]
    by_shape = find_shape_sorted_groups(groups)
    shapes = _infer_member_shapes(wrapper)
    try:
        names = name_groups(candidates, shapes, by_shape=by_shape)
    except AmbiguousError:
        divided = name_divided(candidates, shapes, _list_divisions(groups, find_divisions))
        if divided is None:
            raise
        return divided
    if any(None in fqns for fqns in names):
        return name_divided(candidates, shapes, _list_divisions(groups, find_divisions)) or names
    return names


def _list_divisions(
    groups: Sequence[Mapping[str, Any]], find_divisions: FindDivisions
) -> tuple[Division, ...]:
    return find_divisions() if may_be_divided_by_decay(groups) else ()


def _read_declared_names(model: ModelStates, candidates: Mapping[str, Index]) -> _Names:
    # ``param_names`` (torch 2.6 ``optim/optimizer.py``) are unusable if a group has more or fewer
    # names than members, because the indices of the groups after it depend on their number.
    listed: _Names = []
    for group in unwrap_optimizer(model.get_section("optimizer")).get("param_groups", []):
        given = group.get("param_names")
        names = list(given) if isinstance(given, (list, tuple)) else []
        is_complete = len(names) == len(group.get("params", []))
        if not names or not is_complete or not all(name in candidates for name in names):
            return []
        listed.append(names)
    flat = [name for names in listed for name in names]
    return listed if len(set(flat)) == len(flat) else []


def _infer_member_shapes(wrapper: Mapping[str, Any]) -> list[list[Signature]]:
    masters = wrapper.get("fp32_groups")
    if masters:
        return [[tensor.shape for tensor in group] for group in masters]
    optimizer = unwrap_optimizer(wrapper)
    state = optimizer.get("state", {})
    return [
        [_infer_shape(state.get(index, {})) for index in group.get("params", [])]
        for group in optimizer.get("param_groups", [])
    ]


def _infer_shape(state: Mapping[str, Any]) -> Signature:
    tensors = {
        name: value.shape
        for name, value in flatten_state(state).items()
        if isinstance(value, Tensor)
    }
    own = {name: shape for name, shape in tensors.items() if not nested_slots.is_nested(name)}
    return optimizers.infer_shape(own or tensors)


def _name_expert_groups(
    candidates: Mapping[str, Index],
    shapes: Sequence[Sequence[Signature]],
    of_experts: Sequence[bool],
    hypers: Sequence[Mapping[str, Any]],
) -> _Names:
    """Name groups of experts and other groups apart (DeepSpeed 0.19.8 ``moe/utils.py``)."""
    named: dict[bool, Iterator[list[str | None]]] = {}
    for kind in (False, True):
        own = {n: s for n, s in candidates.items() if (parse_expert_name(n) is not None) == kind}
        groups = [group for group, moe in zip(shapes, of_experts, strict=True) if moe == kind]
        by_shape = find_shape_sorted_groups(
            hyper for hyper, moe in zip(hypers, of_experts, strict=True) if moe == kind
        )
        named[kind] = iter(name_groups(own, groups, by_shape=by_shape))
    return [next(named[kind]) for kind in of_experts]


_States = list[tuple[Sequence[str | None], Mapping[str, Any]]]


def _pair_states(wrapper: Mapping[str, Any], names: _Names) -> _States:
    owners = names if wrapper.get("fp32_groups_flat") else [[fqn] for own in names for fqn in own]
    state = unwrap_optimizer(wrapper).get("state", {})
    return [(fqns, flatten_state(state.get(index, {}))) for index, fqns in enumerate(owners)]


def _find_unread(
    wrapper: Mapping[str, Any], fqns: Sequence[str | None], state: Mapping[str, Any]
) -> set[str]:
    """Return the keys of a state that become neither an entry nor the step."""
    if wrapper.get("fp32_groups_flat"):
        return state.keys() - select_flat_slots(state) - {"step"}
    if fqns == [None]:
        return set()
    return {name for name, value in state.items() if not isinstance(value, Tensor)} - {"step"}


def _read_steps(model: ModelStates, states: _States) -> dict[str, float]:
    optimizer = unwrap_optimizer(model.get_section("optimizer"))
    steps: dict[str, float] = {}
    for index, (fqns, state) in enumerate(states):
        step = read_number(model.file, find_step(state, optimizer, index))
        if step is not None:
            steps.update({fqn: step for fqn in fqns if fqn is not None})
    return steps


def _read_entries(model: ModelStates, names: _Names, states: _States) -> Iterator[Entry]:
    wrapper = model.get_section("optimizer")
    flats = wrapper.get("fp32_groups_flat") or []
    for members, masters in zip(names, wrapper.get("fp32_groups") or [], strict=False):
        for fqn, tensor in zip(members, masters, strict=True):
            if fqn is not None:
                yield make_whole_entry(fqn, MASTER, tensor)
    for number, (fqns, state) in enumerate(states):
        own = [fqn for fqn in fqns if fqn is not None]
        if number < len(flats):
            yield from _split(model, own, {MASTER: flats[number]} | select_flat_slots(state))
        elif own and not flats:
            for slot, value in state.items():
                if slot != "step" and isinstance(value, Tensor):
                    yield make_whole_entry(own[0], slot, value)


def _split(
    model: ModelStates, names: Sequence[str], slots: Mapping[str, Tensor]
) -> Iterator[Entry]:
    """Yield the members of a group's flat tensors, which have no padding (FP16_Optimizer)."""
    module = model.module
    shapes = {fqn: module[fqn].shape for fqn in names}
    group = FlatGroup(shapes, 1, (0,) * len(shapes), alignment=1)
    for kind, flat in slots.items():
        if flat.numel != group.numel:
            raise CorruptError(
                model.file.path,
                f"has a flat {kind} of {flat.numel} elements, but the members of its group have"
                f" {group.numel}",
            )
        yield from group.split(kind, [flat], group.runs)


def _group_by_shape(candidates: Mapping[str, Index]) -> dict[Index, list[str]]:
    by_shape: dict[Index, list[str]] = {}
    for fqn, shape in candidates.items():
        by_shape.setdefault(shape, []).append(fqn)
    return by_shape


def _name_fused_groups(
    model: ModelStates, candidates: Mapping[str, Index], flats: Sequence[Tensor]
) -> list[list[str]]:
    by_shape = _group_by_shape(candidates)
    sizes = {shape: prod(shape) * len(fqns) for shape, fqns in by_shape.items()}
    fitting = islice(_search_assignments(sizes, [flat.numel for flat in flats]), _MOST_ASSIGNMENTS)
    named = (
        [[f for f, shape in candidates.items() if owners[shape] == n] for n in range(len(flats))]
        for owners in fitting
    )
    with SourceFiles() as files:
        # A second fitting assignment already makes the choice ambiguous, so two are enough.
        fits = (names for names in named if _match_masters(files, model.module, names, flats))
        matches = list(islice(fits, 2))
    if len(matches) != 1:
        raise AmbiguousError(
            list(candidates), "were joined by a fused optimizer in an order that no file states"
        )
    return matches[0]


def _search_assignments(
    sizes: Mapping[Index, int], numels: Sequence[int]
) -> Iterator[dict[Index, int | None]]:
    """Yield each way to fill groups of ``numels`` elements: shape -> its group, or None."""
    # Large shapes first: fewer groups have room for them, so that wrong branches end early.
    order = sorted(sizes, key=lambda shape: -sizes[shape])
    steps = iter(range(_MOST_STEPS if len(order) <= _MOST_SHAPES else 0))

    def search(at: int, left: list[int], rest: int) -> Iterator[dict[Index, int | None]]:
        if sum(left) > rest or next(steps, None) is None:
            return
        if at == len(order):
            yield {}
            return
        size = sizes[order[at]]
        for owner in (*range(len(left)), None):
            after = [n - size if number == owner else n for number, n in enumerate(left)]
            if min(after, default=0) >= 0:
                for others in search(at + 1, after, rest - size):
                    yield {order[at]: owner, **others}

    return search(0, list(numels), sum(sizes.values()))


def _match_masters(
    files: SourceFiles,
    module: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]],
    flats: Sequence[Tensor],
) -> bool:
    for names, flat in zip(groups, flats, strict=True):
        start = 0
        for weight in (module[fqn] for fqn in names):
            last = weight.numel - 1
            for at in sorted({0, weight.numel // 2, last}) if weight.numel else ():
                own = read_weight(files, weight.chunk, at)
                master = read_weight(files, flat.chunk, start + at)
                if not _is_rounded(own, master):
                    return False
            start += weight.numel
    return True
