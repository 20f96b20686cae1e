"""Stage 0: whole tensors, the optimizer's under an index instead of a name.

fp32: torch's own optimizer dict. bf16 and fp16 (DeepSpeed 0.19.8 ``runtime/fp16/
unfused_optimizer.py``, ``fused_optimizer.py``): fp32 copies a group, whole (``fp32_groups``) or
flat (``fp32_groups_flat``), and a state by index over the groups.

No file names the indices. A parameter is matched by its shape and the order of ``module``, which
is an answer only where each shape belongs to one group and its count agrees; otherwise the
optimizer is left out and the reader says so. A member that was never stepped has no state, hence
no shape; it needs a name for its group only, and gets one where its neighbours leave one choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard.box import Index, whole
from reshard.errors import CorruptError
from reshard.formats.deepspeed.flat import slots_of
from reshard.formats.deepspeed.states import ModelStates, whole_entry
from reshard.formats.torch_file import Tensor
from reshard.manifest import MASTER, Entry, contiguous

_NO_STATE: Index = (-1,)  # the shape of a member that was never stepped: not in the file


class AmbiguousError(Exception):
    """Shapes and order do not say which parameters the indices mean."""

    def __init__(self, fqns: Sequence[str]) -> None:
        shown = ", ".join(fqns[:3]) + (" ..." if len(fqns) > 3 else "")
        super().__init__(
            "stage 0 stores its optimizer by index, and these parameters of one shape stand in"
            f" several groups, or are frozen or never stepped in part: {shown};"
            " fp32 masters and moments are left out"
        )


def name_groups(
    candidates: Mapping[str, Index], groups: Sequence[Sequence[Index]]
) -> list[list[str | None]]:
    """The fqn of each member of each group; None for one without state that has no name either.

    Args:
        candidates: every parameter of the module, in order, frozen ones included.
        groups: the members' shapes, in order.

    Raises:
        AmbiguousError: more than one assignment of the members with state fits.
    """
    by_shape: dict[Index, list[str]] = defaultdict(list)
    for fqn, shape in candidates.items():
        by_shape[shape].append(fqn)
    counts = [Counter(group) for group in groups]
    for shape in set().union(*counts) - {_NO_STATE}:
        holders = [count[shape] for count in counts if count[shape]]
        if holders != [len(by_shape[shape])]:
            raise AmbiguousError(by_shape[shape] or [f"no parameter has shape {shape}"])
    orders = {shape: iter(fqns) for shape, fqns in by_shape.items()}
    named = [[None if s == _NO_STATE else next(orders[s]) for s in group] for group in groups]
    _name_stateless(named, list(candidates))
    return named


def _name_stateless(groups: list[list[str | None]], order: list[str]) -> None:
    """Name members without state where the names around them in their group leave one choice."""
    position = {fqn: index for index, fqn in enumerate(order)}
    free = set(order) - {fqn for group in groups for fqn in group}
    for group in groups:
        known = [-1 if fqn is None else position[fqn] for fqn in group]
        for index, fqn in enumerate(group):
            if fqn is not None:
                continue
            low = max(known[:index], default=-1)
            high = next((p for p in known[index:] if p >= 0), len(order))
            between = [name for name in order[low + 1 : high] if name in free]
            if len(between) == 1:
                group[index] = between[0]
                free.discard(between[0])


def torch_optimizer(model: ModelStates) -> dict[str, Any]:
    """The torch optimizer's own dict, which 16-bit training wraps."""
    optimizer = model.mapping("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return inner if isinstance(inner, dict) else {}


def member_shapes(model: ModelStates) -> list[list[Index]]:
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


def _slot_shape(state: Mapping[str, Any]) -> Index:
    """The shape of the parameter that a state belongs to: that of its largest slot."""
    shapes = [value.shape for value in state.values() if isinstance(value, Tensor)]
    return max(shapes, key=lambda shape: (len(shape), prod(shape)), default=_NO_STATE)


def groups_of(model: ModelStates, candidates: Mapping[str, Index]) -> list[list[str | None]]:
    """The fqn of each member of every group, as `name_groups`.

    Raises:
        AmbiguousError: see `name_groups`.
    """
    shapes = member_shapes(model)
    if len(shapes) == 1 and len(shapes[0]) == len(candidates):
        pairs = zip(shapes[0], candidates.values(), strict=True)
        if all(shape in (_NO_STATE, candidate) for shape, candidate in pairs):
            return [list(candidates)]
    if model.mapping("optimizer").get("fp32_groups_flat"):
        raise AmbiguousError(list(candidates))
    return name_groups(candidates, shapes)


def read(model: ModelStates, groups: Sequence[Sequence[str | None]]) -> Iterator[Entry]:
    """Master weights and slots of every named parameter."""
    shapes = {name: tensor.shape for name, tensor in model.module.items()}
    optimizer = model.mapping("optimizer")
    for names, masters in zip(groups, optimizer.get("fp32_groups") or [], strict=False):
        for fqn, tensor in zip(names, masters, strict=True):
            if fqn is not None:
                yield whole_entry(model.file, fqn, MASTER, tensor)
    state = torch_optimizer(model).get("state", {})
    flats = optimizer.get("fp32_groups_flat") or []
    for number, (names, flat) in enumerate(zip(groups, flats, strict=False)):
        slots = {MASTER: flat} | slots_of(state.get(number, {}))
        yield from _flat(model, [fqn for fqn in names if fqn is not None], shapes, slots)
    if not flats:
        fqns = [fqn for names in groups for fqn in names]
        yield from _indexed(model, fqns, shapes, state)


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
        offset = model.file.chunk(flat).byte_offset
        for fqn in names:
            shape = shapes[fqn]
            chunk = contiguous(model.file.path, offset, flat.dtype, whole(shape), shape)
            yield Entry(fqn, kind, flat.dtype, shape, (chunk,))
            offset += prod(shape) * flat.dtype.itemsize


def _indexed(
    model: ModelStates,
    fqns: Sequence[str | None],
    shapes: Mapping[str, Index],
    state: Mapping[int, Any],
) -> Iterator[Entry]:
    for index, fqn in enumerate(fqns):
        if fqn is None:
            continue
        for slot, value in state.get(index, {}).items():
            if slot != "step" and isinstance(value, Tensor) and value.shape == shapes[fqn]:
                yield whole_entry(model.file, fqn, slot, value)
