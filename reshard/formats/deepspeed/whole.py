"""Stage 0: whole tensors, the optimizer's under an index instead of a name.

fp32: torch's own optimizer dict. bf16 and fp16 (DeepSpeed 0.19.8 ``runtime/fp16/
unfused_optimizer.py``, ``fused_optimizer.py``): fp32 copies a group, whole (``fp32_groups``) or
flat (``fp32_groups_flat``), and a state by index over the groups.

No file names the indices: `optimizer_names` does where it can, otherwise the optimizer is left out
and the reader says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard.box import Index, whole
from reshard.containers.torch_objects import Tensor
from reshard.errors import CorruptError
from reshard.formats.deepspeed import expert_names, fused, train
from reshard.formats.deepspeed.flat import left_out, slots_of
from reshard.formats.deepspeed.states import ModelStates, whole_entry
from reshard.manifest import MASTER, Entry, ParamGroup, TrainState, contiguous
from reshard.state_dict.optimizer_names import AmbiguousError, Signature, name_groups


def state_of(
    first: ModelStates, tied: Mapping[str, str]
) -> tuple[list[Entry], TrainState, list[str]]:
    """Its entries, the train state and warnings; the model states keep it, or there is none."""
    held = first.mapping("optimizer")
    candidates = {
        name: tensor.shape
        for name, tensor in first.module.items()
        if name not in first.buffers and name not in tied and tensor.numel
    }
    stored = torch_optimizer(first).get("param_groups", [])
    warnings: list[str] = []
    names: list[list[str | None]] = []
    if held:
        try:
            names = groups_of(first, candidates)
        except AmbiguousError as reason:
            warnings.append(
                f"stage 0 stores its optimizer by index, and {reason}; fp32 masters and moments are"
                " left out"
            )
    entries = list(read(first, names))
    members = names or [[] for _ in stored]
    groups = [
        ParamGroup(train.hyper(group), tuple(fqn for fqn in fqns if fqn is not None))
        for group, fqns in zip(stored, members, strict=False)
    ]
    unnamed = sum(fqn is None for fqns in names for fqn in fqns)
    if unnamed:
        warnings.append(
            f"{unnamed} parameters without state (never stepped, or empty) cannot be named by"
            " their index: they are in no param group here"
        )
    warnings += left_out(unread(first, names))
    state = train.state(first, groups=groups, steps=steps(first, names), optimizer_root=held)
    return entries, state, warnings


def torch_optimizer(model: ModelStates) -> dict[str, Any]:
    """The torch optimizer's own dict, which 16-bit training wraps."""
    optimizer = model.mapping("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return inner if isinstance(inner, dict) else {}


def member_shapes(model: ModelStates) -> list[list[Signature]]:
    """Shapes of every group's members as far as the file tells them."""
    masters = model.mapping("optimizer").get("fp32_groups")
    if masters:
        return [[tensor.shape for tensor in group] for group in masters]
    optimizer = torch_optimizer(model)
    state = optimizer.get("state", {})
    return [
        [_slot_shape(state.get(index, {})) for index in group.get("params", [])]
        for group in optimizer.get("param_groups", [])
    ]


def _slot_shape(state: Mapping[str, Any]) -> Signature:
    """The shape of the parameter that a state belongs to: that of its largest slot."""
    shapes = [value.shape for value in state.values() if isinstance(value, Tensor)]
    return max(shapes, key=lambda shape: (len(shape), prod(shape)), default=None)


def groups_of(model: ModelStates, candidates: Mapping[str, Index]) -> list[list[str | None]]:
    """The fqn of each member of every group: as named there, else as `name_groups`.

    Raises:
        AmbiguousError: see `optimizer_names.name_groups`.
    """
    named = _named(model, candidates)
    if named:
        return named
    shapes = member_shapes(model)
    experts = [bool(group.get("moe")) for group in torch_optimizer(model).get("param_groups", [])]
    if any(experts):
        return _of_experts(candidates, shapes, experts)
    flats = model.mapping("optimizer").get("fp32_groups_flat")
    if flats:
        return [[*names] for names in fused.name_groups(model, candidates, flats)]
    return name_groups(candidates, shapes)


def _of_experts(
    candidates: Mapping[str, Index], shapes: Sequence[Sequence[Signature]], experts: Sequence[bool]
) -> list[list[str | None]]:
    """Experts stand in groups of their own (DeepSpeed 0.19.8 ``moe/utils.py``)."""
    named: dict[bool, Iterator[list[str | None]]] = {}
    owned = {name for name in candidates if expert_names.parse(name)}
    for kind in (False, True):
        of_kind = {n: shape for n, shape in candidates.items() if (n in owned) == kind}
        groups = [group for group, moe in zip(shapes, experts, strict=True) if moe == kind]
        named[kind] = iter(name_groups(of_kind, groups))
    return [next(named[kind]) for kind in experts]


def _named(model: ModelStates, candidates: Mapping[str, Index]) -> list[list[str | None]]:
    """What an optimizer of named parameters says (torch 2.6 ``optim/optimizer.py``)."""
    listed: list[list[str | None]] = []
    for group in torch_optimizer(model).get("param_groups", []):
        given = group.get("param_names")
        names = list(given) if isinstance(given, (list, tuple)) else []
        if not names or not all(name in candidates for name in names):
            return []
        listed.append(names)
    named = [name for names in listed for name in names]
    return listed if len(set(named)) == len(named) else []


def read(model: ModelStates, groups: Sequence[Sequence[str | None]]) -> Iterator[Entry]:
    """Master weights and slots of every named parameter.

    Raises:
        CorruptError: a flat tensor is not as long as its parameters.
    """
    shapes = {name: tensor.shape for name, tensor in model.module.items()}
    optimizer = model.mapping("optimizer")
    for names, masters in zip(groups, optimizer.get("fp32_groups") or [], strict=False):
        for fqn, tensor in zip(names, masters, strict=True):
            if fqn is not None:
                yield whole_entry(fqn, MASTER, tensor)
    state = torch_optimizer(model).get("state", {})
    flats = optimizer.get("fp32_groups_flat") or []
    for number, (names, flat) in enumerate(zip(groups, flats, strict=False)):
        slots = {MASTER: flat} | slots_of(state.get(number, {}))
        yield from _flat(model, [fqn for fqn in names if fqn is not None], shapes, slots)
    if not flats:
        fqns = [fqn for names in groups for fqn in names]
        yield from _indexed(fqns, state)


def unread(model: ModelStates, groups: Sequence[Sequence[str | None]]) -> set[str]:
    """Return the names of what no entry has: neither a tensor nor the step."""
    state = torch_optimizer(model).get("state", {})
    if model.mapping("optimizer").get("fp32_groups_flat"):
        held = [state.get(number, {}) for number in range(len(groups))]
        return {name for each in held for name in each.keys() - slots_of(each).keys()} - {"step"}
    fqns = [fqn for names in groups for fqn in names]
    return {
        str(name)
        for index, fqn in enumerate(fqns)
        if fqn is not None
        for name, value in state.get(index, {}).items()
        if name != "step" and not isinstance(value, Tensor)
    }


def steps(model: ModelStates, groups: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Optimizer updates applied to each named parameter."""
    optimizer = torch_optimizer(model)
    state = optimizer.get("state", {})
    is_flat = model.mapping("optimizer").get("fp32_groups_flat")
    owners = groups if is_flat else [[fqn] for names in groups for fqn in names]
    found: dict[str, float] = {}
    for index, fqns in enumerate(owners):
        step = train.number(model.file, train.step_of(state.get(index, {}), optimizer, index))
        if step is not None:
            found.update({fqn: step for fqn in fqns if fqn is not None})
    return found


def _flat(
    model: ModelStates,
    names: Sequence[str],
    shapes: Mapping[str, Index],
    slots: Mapping[str, Tensor],
) -> Iterator[Entry]:
    """FP16_Optimizer: one flat tensor a group, without padding."""
    total = sum(prod(shapes[fqn]) for fqn in names)
    for kind, flat in slots.items():
        if flat.numel != total:
            raise CorruptError(
                model.file.path, f"a flat {kind} of {flat.numel} elements, its group has {total}"
            )
        offset = flat.chunk.byte_offset
        for fqn in names:
            shape = shapes[fqn]
            chunk = contiguous(model.file.path, offset, flat.dtype, whole(shape), shape)
            yield Entry(fqn, kind, flat.dtype, shape, (chunk,))
            offset += prod(shape) * flat.dtype.itemsize


def _indexed(fqns: Sequence[str | None], state: Mapping[int, Any]) -> Iterator[Entry]:
    for index, fqn in enumerate(fqns):
        if fqn is None:
            continue
        for slot, value in state.get(index, {}).items():
            if slot != "step" and isinstance(value, Tensor):
                yield whole_entry(fqn, slot, value)
