"""Build each rank's raw optimizer under FSDP 1: of flat parameters, or of the original ones."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.containers.torch_writer import Storage, StorageView, build_whole_tensor
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.errors import UnsupportedError
from reshard.formats.fsdp.flat_units import Flat, find_ignored, iterate_run
from reshard.layouts.partition import compute_equal_piece
from reshard.model import ModelShapes
from reshard.state_dict import flat_params, torch_state_dict
from reshard.state_dict.optimizers import nested_slots
from reshard.state_dict.slots import build_whole_slot
from reshard.training.shared_scalars import build_shared_scalars
from reshard.training.state import (
    TrainedParameter,
    WritableState,
    collect_slot_names,
    refuse_non_elementwise_slots,
)

_REMEDY = "write DCP or whole files"


def _build_optimizer(state: WritableState) -> dict[str, Any]:
    why = "a flat parameter cannot store it"
    refuse_non_elementwise_slots(state, why, _REMEDY, placed=state.scalars)
    return torch_state_dict.build_optimizer(state, "fqn")  # refuses a state that lacks a part


@dataclass(frozen=True, slots=True)
class _FlatState:
    """The optimizer's state of one flat parameter; empty if the parameter was never stepped.

    Args:
        scalars: the 0-d slots, which every rank has.
        non_tensors: state that is neither a tensor nor the step.
    """

    flat: Flat
    slots: Mapping[str, tuple[DType, tuple[tuple[int, Entry], ...]]] = field(default_factory=dict)
    scalars: Mapping[str, StorageView] = field(default_factory=dict)
    step: float | None = None
    non_tensors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.flat.key

    def build_rank(self, rank: int, ranks: int) -> dict[str, Any]:
        start, stop = compute_equal_piece(self.flat.numel, ranks, rank)
        size = -(-self.flat.numel // ranks)
        slots = _build_step(self.step, self.slots)
        for name, (dtype, entries) in self.slots.items():
            storage = Storage(dtype, size, tuple(iterate_run(entries, start, stop)))
            slots[name] = StorageView(storage, (size,))
        return nested_slots.unflatten({**slots, **self.scalars, **self.non_tensors})


@dataclass(frozen=True, slots=True)
class _WholeState:
    key: str
    slots: Mapping[str, Any]

    def build_rank(self, _rank: int, _ranks: int) -> Mapping[str, Any]:
        return self.slots


_FlatGroup = tuple[dict[str, Any], list[_FlatState | _WholeState]]


def _build_flat_groups(
    state: WritableState, model: ModelShapes, flats: Sequence[Flat]
) -> list[_FlatGroup]:
    optimizer = _build_optimizer(state)
    group_of = {
        member.fqn: (number, member)
        for number, group in enumerate(state.groups)
        for member in group.members
    }
    groups: list[_FlatGroup] = [
        ({name: value for name, value in group.items() if name != "params"}, [])
        for group in optimizer["param_groups"]
    ]
    ignored = find_ignored(state, model)
    for owner in _sort_owners(model, flats, ignored):
        if isinstance(owner, str):
            fqn = ignored[owner].fqn
            if fqn in group_of:
                slots = optimizer["state"].get(fqn, {})
                groups[group_of[fqn][0]][1].append(_WholeState(owner, slots))
            continue
        owners = [group_of.get(weight.fqn) for _, weight in owner.members]
        owned = [owner for owner in owners if owner is not None]
        if not owned:
            continue
        numbers = {number for number, _ in owned}
        if len(numbers) > 1 or len(owned) < len(owners):
            _refuse_unit(owner, owners)
        (number,) = numbers
        members = [member for _, member in owned]
        groups[number][1].append(_build_flat_state(state, owner, members))
    return groups


def _sort_owners(
    model: ModelShapes, flats: Sequence[Flat], ignored: Container[str]
) -> list[Flat | str]:
    numbers = {fqn: number for number, fqn in enumerate(model.parameters)}
    alone = [(float(number), fqn) for fqn, number in numbers.items() if fqn in ignored]
    if not alone:
        return [*flats]
    placed: list[tuple[float, Flat | str]] = [
        (flat_params.find_place(flat.unit.prefix, ignored, numbers), flat) for flat in flats
    ]
    return [owner for _, owner in sorted([*placed, *alone], key=lambda pair: pair[0])]


def _refuse_unit(flat: Flat, owners: Sequence[tuple[int, TrainedParameter] | None]) -> None:
    numbers = [None if owner is None else owner[0] for owner in owners]
    at = next(i for i, number in enumerate(numbers) if number != numbers[0])
    first, other = (flat.members[i][1].fqn for i in (0, at))
    raise UnsupportedError(
        flat.unit.prefix or "the root's flat parameter",
        f"{first!r} and {other!r} would be in one flat parameter, but they are in different param"
        " groups, or only one of them is trained",
        "write DCP or whole files, or wrap them in different units",
    )


def _build_flat_state(
    state: WritableState, flat: Flat, members: Sequence[TrainedParameter]
) -> _FlatState:
    non_tensors = {
        member.fqn: torch_state_dict.get_non_tensor_state(state, member) for member in members
    }
    stepped = [m for m in members if m.slots or m.step is not None or non_tensors[m.fqn]]
    if not stepped:
        return _FlatState(flat)
    first = stepped[0]
    unit = flat.unit.prefix or "the root's flat parameter"
    steps = {member.step for member in stepped}
    if len(steps) > 1:
        raise UnsupportedError(
            unit,
            f"its members were stepped {sorted(map(str, steps))} times, but a flat parameter has"
            " one step",
            _REMEDY,
        )
    for name in dict.fromkeys(name for member in stepped for name in non_tensors[member.fqn]):
        values = [non_tensors[member.fqn].get(name) for member in stepped]
        if any(value != values[0] for value in values):
            raise UnsupportedError(
                unit,
                f"the optimizer keeps a different {name} for each member, but a flat parameter has"
                " one",
                _REMEDY,
            )
    scalars = _build_scalars(unit, stepped)
    slots = {}
    for name in collect_slot_names(stepped):
        if name in scalars:
            continue
        entries = []
        for (start, _), member in zip(flat.members, members, strict=True):
            entry = member.slots.get(name)
            if entry is not None:  # a member that was never stepped has zeros, as in FSDP 1 itself
                entries.append((start, entry))
        widest = max((entry.dtype for _, entry in entries), key=lambda dtype: dtype.itemsize)
        slots[name] = (widest, tuple(entries))
    return _FlatState(flat, slots, scalars, first.step, non_tensors[first.fqn])


def _build_scalars(unit: str, stepped: Sequence[TrainedParameter]) -> dict[str, StorageView]:
    # torch 2.13 ``distributed/fsdp/_optim_utils.py`` (``_flatten_zero_dim_tensor_optim_state``).
    why = "a flat parameter has one value for all its members"
    scalars = build_shared_scalars(stepped, why, _REMEDY)
    for name in scalars:
        lacking = [member.fqn for member in stepped if name not in member.slots]
        if lacking:
            raise UnsupportedError(
                unit, f"the optimizer has no {name} of {lacking[0]!r}: {why}", _REMEDY
            )
    return scalars


class FlatOptimizer:
    """The optimizer of ``use_orig_params=False``: flat parameters, numbered through the groups."""

    def __init__(self, state: WritableState, model: ModelShapes, flats: Sequence[Flat]) -> None:
        self._groups = _build_flat_groups(state, model, flats)

    def build_rank(self, rank: int, ranks: int) -> dict[str, Any]:
        """Return the optimizer of one rank."""
        groups = (
            (hyper, [(state.key, state.build_rank(rank, ranks)) for state in states])
            for hyper, states in self._groups
        )
        return torch_state_dict.assemble_optimizer(groups, named=False)


class OrigOptimizer:
    """The optimizer of ``use_orig_params=True``: slices of parameters, numbered as in the model."""

    def __init__(
        self, state: WritableState, model: ModelShapes, flats: Sequence[Flat], compute: DType
    ) -> None:
        self._state = state
        self._flats = flats
        self._compute = compute
        self._scalars = state.scalars
        self._needs_names = torch_state_dict.needs_param_names(state)
        self._groups = [
            (torch_state_dict.build_hyper(state, group), members)
            for group, members in zip(
                state.groups, torch_state_dict.order_members(state, "index", model), strict=True
            )
        ]
        _build_optimizer(state)  # refuses state that slices of flat parameters cannot hold

    def build_rank(self, rank: int, ranks: int) -> dict[str, Any]:
        """Return the optimizer of one rank; a parameter without elements there has no state."""
        runs = self._find_runs(rank, ranks)
        groups = (
            (
                hyper,
                [
                    (member.fqn, self._slice_member(member, runs.get(member.fqn), ranks))
                    for member in members
                ],
            )
            for hyper, members in self._groups
        )
        return torch_state_dict.assemble_optimizer(groups, named=self._needs_names)

    def _slice_member(
        self, member: TrainedParameter, span: tuple[int, int] | None, ranks: int
    ) -> dict[str, Any]:
        """Return a rank's slices; a single rank has whole tensors (FSDP 1 is NO_SHARD there)."""
        start, stop = span or (0, member.weight.value.numel)
        if start >= stop:
            return {}
        slots = _build_step(member.step, member.slots)
        for name, entry in member.slots.items():
            if name in self._scalars:
                slots[name] = build_whole_tensor(entry, entry.dtype)
                continue
            parts = tuple(iterate_run([(0, entry)], start, stop))
            shape = entry.shape if ranks == 1 or span is None else (stop - start,)
            slots[name] = StorageView(Storage(entry.dtype, stop - start, parts), shape)
        return nested_slots.unflatten(
            {**slots, **torch_state_dict.get_non_tensor_state(self._state, member)}
        )

    def _find_runs(self, rank: int, ranks: int) -> dict[str, tuple[int, int]]:
        runs = {}
        for flat in self._flats:
            starts, total = flat.place_aligned(self._compute, ranks)
            low, high = compute_equal_piece(total, ranks, rank)
            for _, weight in flat.members:
                start = starts[weight.fqn]
                stop = start + weight.value.numel
                runs[weight.fqn] = (max(low, start) - start, min(high, stop) - start)
        return runs


def _build_step(step: float | None, slots: Collection[str]) -> dict[str, StorageView | int]:
    if step is None:
        return {}
    counter = torch_state_dict.build_counter(step, slots)
    return {"step": counter if isinstance(counter, int) else build_whole_slot(counter)}
