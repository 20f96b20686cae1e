"""Stage 0: whole tensors, the optimizer's under an index instead of a name.

fp32: torch's own optimizer dict. bf16 and fp16 (DeepSpeed 0.19.8 ``runtime/fp16/
unfused_optimizer.py``, ``fused_optimizer.py``): fp32 copies a group, whole (``fp32_groups``) or
flat (``fp32_groups_flat``), and a state by index over the groups.

No file names the indices. A parameter is matched by its shape and the order of ``module``, which
is an answer only where each shape belongs to one group and its count agrees; otherwise the
optimizer is left out and the reader says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard.box import Index, whole
from reshard.errors import CorruptError
from reshard.formats.deepspeed.states import ModelStates, whole_entry
from reshard.formats.torch_file import Tensor
from reshard.manifest import MASTER, Entry, contiguous

AMBIGUOUS = (
    "stage 0 stores its optimizer by index, and {count} parameters of equal shape stand in several"
    " groups or are frozen in part ({example}): fp32 masters and moments are left out"
)


class AmbiguousError(Exception):
    """Shapes and order do not say which parameter an index means; ``example`` is one of them."""

    def __init__(self, count: int, example: str) -> None:
        self.count = count
        self.example = example
        super().__init__(AMBIGUOUS.format(count=count, example=example))


def name_groups(
    candidates: Mapping[str, Index], groups: Sequence[Sequence[Index]]
) -> list[list[str]]:
    """The fqns of each group's members, in group order.

    Args:
        candidates: every parameter of the module, in order, frozen ones included.
        groups: the members' shapes, in order.

    Raises:
        AmbiguousError: more than one assignment fits.
    """
    waiting: dict[Index, list[str]] = defaultdict(list)
    for fqn, shape in candidates.items():
        waiting[shape].append(fqn)
    counts = [Counter(group) for group in groups]
    for shape, fqns in waiting.items():
        holders = [count[shape] for count in counts if count[shape]]
        if holders and holders != [len(fqns)]:
            raise AmbiguousError(len(fqns), fqns[0])
    unknown = set().union(*counts) - set(waiting) if counts else set()
    if unknown:
        raise AmbiguousError(len(unknown), f"no parameter has shape {min(unknown)}")
    orders = {shape: iter(fqns) for shape, fqns in waiting.items()}
    return [[next(orders[shape]) for shape in group] for group in groups]


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
    return max(shapes, key=lambda shape: (len(shape), prod(shape)), default=(-1,))


def groups_of(model: ModelStates, candidates: Mapping[str, Index]) -> list[list[str]]:
    """Fqns of every group.

    A group whose members have no state yet (never stepped) has no shapes; then only a count that
    equals the number of candidates names them.

    Raises:
        AmbiguousError: see `name_groups`.
    """
    shapes = member_shapes(model)
    if sum(map(len, shapes)) == len(candidates) and len(shapes) == 1:
        names = list(candidates)
        known = all(
            shape in ((-1,), candidates[name]) for shape, name in zip(shapes[0], names, strict=True)
        )
        if known:
            return [names]
    if model.mapping("optimizer").get("fp32_groups_flat"):
        raise AmbiguousError(len(candidates), "flat groups without shapes")
    return name_groups(candidates, shapes)


def read(model: ModelStates, groups: Sequence[Sequence[str]]) -> Iterator[Entry]:
    """Master weights and slots of every named parameter."""
    shapes = {name: tensor.shape for name, tensor in model.module.items()}
    optimizer = model.mapping("optimizer")
    for names, masters in zip(groups, optimizer.get("fp32_groups") or [], strict=False):
        for fqn, tensor in zip(names, masters, strict=True):
            yield whole_entry(model.file, fqn, MASTER, tensor)
    state = torch_optimizer(model).get("state", {})
    flats = optimizer.get("fp32_groups_flat") or []
    for number, (names, flat) in enumerate(zip(groups, flats, strict=False)):
        slots = {MASTER: flat} | _flat_slots(state.get(number, {}))
        yield from _flat(model, names, shapes, slots)
    if not flats:
        fqns = [fqn for names in groups for fqn in names]
        yield from _indexed(model, fqns, shapes, state)


def _flat_slots(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and len(value.shape) == 1
    }


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
    fqns: Sequence[str],
    shapes: Mapping[str, Index],
    state: Mapping[int, Any],
) -> Iterator[Entry]:
    for index, fqn in enumerate(fqns):
        for slot, value in state.get(index, {}).items():
            if slot != "step" and isinstance(value, Tensor) and value.shape == shapes[fqn]:
                yield whole_entry(model.file, fqn, slot, value)
