"""Lay out the files of ranks under FSDP 1: flat parameters, and each rank's raw optimizer.

    fsdp1_local     LOCAL_STATE_DICT and the optimizer of ``use_orig_params=False``
    fsdp1_sharded   SHARDED_STATE_DICT with a device mesh, and the optimizer of either form

Sources: torch 2.13 ``distributed/fsdp/_state_dict_utils.py`` (``_local_post_state_dict_hook``,
``_local_pre_load_state_dict_hook``), ``_flat_param.py`` (``_get_shard``: the padding); verl 0.9
``utils/checkpoint/fsdp_checkpoint_manager.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from reshard.box import flat_span, run_boxes
from reshard.dtypes import DType
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats import skeletons, torch_writer
from reshard.formats.state_dict import written
from reshard.formats.state_dict.distributed import sharded_tensor
from reshard.formats.state_dict.mesh import Grid, Placing
from reshard.formats.state_dict.target import (
    PAIR,
    VERL,
    Naming,
    Sharder,
    accelerate_beside,
    beside,
    is_divided,
    placed,
    whole_slot,
)
from reshard.formats.state_dict.written import Value
from reshard.formats.torch_writer import Part, Slot, Storage
from reshard.formats.training import Trained, Training, Weight, refuse_odd_slots
from reshard.layout import flat_param
from reshard.layout.partition import equal_piece
from reshard.manifest import Entry, Skeleton
from reshard.model import ModelShapes, Unit
from reshard.pickles.values import Call


def fsdp1_local(
    state: Training,
    model: ModelShapes,
    *,
    ranks: int,
    naming: Naming = PAIR,
    weights_only: bool = False,
    dtype: DType | None = None,
) -> Skeleton:
    """LOCAL_STATE_DICT and the raw optimizer of each rank, with ``use_orig_params=False``.

    Args:
        model: what was wrapped, with its units.

    Raises:
        IncompleteError: the source lacks a parameter of the model, or a part of the optimizer.
        UnsupportedError: a unit that cannot be one flat parameter: its members are in several
            groups, or some of them are not trained.
        UsageError: the model has not what the source has, or was not told how it was wrapped.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks", "at least one is needed")
    flats = _flats(state, model, dtype)
    buffers = _buffers(state, model)
    raw = None if weights_only else _FlatOptimizer(state, flats)

    def rank_files(rank: int) -> Iterator[Skeleton]:
        weights: OrderedDict[str, Any] = OrderedDict()
        if ranks == 1:  # FSDP 1 is NO_SHARD then, whose local state dict has whole tensors
            held = written.weights(state, dtype=dtype)
            weights.update((name, whole_slot(value)) for name, value in held.items())
        else:
            for flat in flats:
                weights[flat.key] = flat.shard(rank, ranks)
            weights.update((name, whole_slot(value)) for name, value in buffers.items())
        yield from _files(naming, weights, raw, rank, ranks)
        yield from beside(state, naming, rank, ranks, version=1, weights_only=weights_only)

    files = [file for rank in range(ranks) for file in rank_files(rank)]
    if naming.accelerate and not weights_only:
        files += accelerate_beside(state, ranks)
    return skeletons.joined(files)


def fsdp1_sharded(
    state: Training,
    model: ModelShapes,
    grid: Grid,
    *,
    naming: Naming = VERL,
    compute: DType | None = None,
    weights_only: bool = False,
    dtype: DType | None = None,
) -> Skeleton:
    """DTensors of each rank and its raw optimizer, as verl keeps them.

    Args:
        compute: with ``use_orig_params=True``, the dtype of the forward pass
            (``MixedPrecision.param_dtype``, else the parameters' own); None writes what
            ``use_orig_params=False`` has.

    Raises:
        IncompleteError, UnsupportedError, UsageError: as `fsdp1_local`.
    """
    if len(grid.sizes) > 1:
        raise UnsupportedError(f"a mesh of {grid}", "is not written for FSDP 1")
    placing, ranks = Placing(grid), grid.world
    flats = _flats(state, model, dtype)
    held = OrderedDict(written.weights(state, dtype=dtype, divided=is_divided(state, model)))
    raw: _FlatOptimizer | _OrigOptimizer | None = None
    if not weights_only:
        raw = (
            _FlatOptimizer(state, flats)
            if compute is None
            else _OrigOptimizer(state, model, flats, compute)
        )

    def rank_files(rank: int) -> Iterator[Skeleton]:
        yield from _files(naming, Sharder(placing, rank).of(held), raw, rank, ranks)
        yield from beside(state, naming, rank, ranks, version=1, weights_only=weights_only)

    return skeletons.joined(file for rank in range(ranks) for file in rank_files(rank))


def _files(
    naming: Naming,
    weights: Any,
    raw: _FlatOptimizer | _OrigOptimizer | None,
    rank: int,
    ranks: int,
) -> Iterator[Skeleton]:
    names = [name.format(rank=rank, world=ranks) for name in (naming.model, naming.optimizer)]
    moments = None if raw is None else raw.of(rank, ranks)
    for name, root in placed(names, weights, moments).items():
        yield torch_writer.lay_out_object(name, root)


@dataclass(frozen=True, slots=True)
class _Flat:
    """One flat parameter: its members, each with its first element."""

    unit: Unit
    members: tuple[tuple[int, Weight], ...]
    numel: int
    dtype: DType

    @property
    def key(self) -> str:
        """Its name in the model's state dict."""
        return f"{self.unit.prefix}._flat_param" if self.unit.prefix else "_flat_param"

    def shard(self, rank: int, ranks: int) -> Call:
        """A rank's piece of it, without padding."""
        pieces = [equal_piece(self.numel, ranks, each) for each in range(ranks)]
        start, stop = pieces[rank]
        entries = [(at, weight.value) for at, weight in self.members]
        storage = Storage(self.dtype, stop - start, tuple(_run(entries, start, stop)))
        local = Slot(storage, (stop - start,)) if start < stop else None
        return sharded_tensor(self.dtype, self.numel, local, rank, pieces)


def _run(entries: Sequence[tuple[int, Entry]], start: int, stop: int) -> Iterator[Part]:
    """What fills the run ``[start, stop)`` of a flat tensor of entries at their first elements."""
    for at, entry in entries:
        first, last = max(at, start), min(at + entry.numel, stop)
        for box in run_boxes(entry.shape, first - at, last - at):
            offset = flat_span(box, entry.shape)[0] + at - start
            yield Part(entry.kind, entry.fqn, entry.shape, box, offset)


def _flats(state: Training, model: ModelShapes, dtype: DType | None) -> list[_Flat]:
    if not model.units:
        raise UsageError(
            model.source, "does not say how FSDP wrapped it", "give --wrap as the run will have it"
        )
    weights = {weight.fqn: weight for weight in state.weights}
    flats = []
    for unit in model.units:
        held = [_of_model(state, weights, model, fqn) for fqn in unit.members]
        starts, numel = flat_param.place(
            [(fqn, weight.shape) for fqn, weight in zip(unit.members, held, strict=True)],
            aligned_to=1,
            ranks=1,
        )
        members = tuple(zip((starts[fqn] for fqn in unit.members), held, strict=True))
        flats.append(_Flat(unit, members, numel, _widest(held, dtype)))
    _refuse_foreign(state, model)
    return flats


def _of_model(
    state: Training, weights: Mapping[str, Weight], model: ModelShapes, fqn: str
) -> Weight:
    """The source's weight for one of the model's parameters, under any of its names."""
    aliases = (alias for alias, first in model.tied.items() if first == fqn)
    names = [fqn, *aliases]
    names += [kept for alias, kept in state.manifest.tied.items() if alias in names]
    found = next((weights[name] for name in names if name in weights), None)
    if found is None:
        raise IncompleteError(
            state.manifest.origin.path, f"has no {fqn!r}, which {model.source} has"
        )
    if found.shape != model.parameters[fqn]:
        raise UsageError(
            model.source,
            f"{fqn!r} is {model.parameters[fqn]} in it, {found.shape} in the checkpoint",
        )
    return found


def _widest(held: Sequence[Weight], dtype: DType | None) -> DType:
    """The dtype of a flat parameter, which holds that of each of its members."""
    dtypes = [written.weight_dtype(weight, dtype) for weight in held]
    widest = max(dtypes, key=lambda each: each.itemsize)
    other = next((d for d in dtypes if d != widest and d.itemsize == widest.itemsize), None)
    strange = next((d for d in dtypes if d.family != "float"), None)
    if len(set(dtypes)) > 1 and (other or strange):
        raise UnsupportedError(
            held[0].fqn, f"is {dtypes[0]}, others of its unit are {other or strange}"
        )
    return widest


def _refuse_foreign(state: Training, model: ModelShapes) -> None:
    """A weight that the model has not would be lost."""
    known = model.parameters.keys() | model.buffers.keys() | model.tied.keys()
    for weight in state.weights:
        aliases = {alias for alias, kept in state.manifest.tied.items() if kept == weight.fqn}
        if not known & {weight.fqn, *aliases}:
            raise UsageError(model.source, f"has no {weight.fqn!r}, which the checkpoint holds")


def _buffers(state: Training, model: ModelShapes) -> dict[str, Value]:
    every = written.weights(state)
    names = [*model.buffers, *(a for a, first in model.tied.items() if first in model.buffers)]
    missing = [name for name in model.buffers if name not in every]
    if missing:
        raise IncompleteError(
            state.manifest.origin.path, f"has no {missing[0]!r}, which {model.source} has"
        )
    return {name: every[model.tied.get(name, name)] for name in names}


def _optimizer(state: Training) -> dict[str, Any]:
    """The optimizer by names, where flat parameters have a place for all of it."""
    why = "it has no place in a flat parameter"
    refuse_odd_slots(state, why, "write DCP or whole files")
    return written.optimizer(state, "fqn")  # refuses what is missing


@dataclass(frozen=True, slots=True)
class _FlatState:
    """The optimizer's state of one flat parameter; without slots it was never stepped."""

    flat: _Flat
    slots: Mapping[str, tuple[DType, tuple[tuple[int, Entry], ...]]]
    step: float | None

    def values(self, rank: int, ranks: int) -> dict[str, Slot | int]:
        """A rank's pieces, padded with zeros to equal length."""
        start, stop = equal_piece(self.flat.numel, ranks, rank)
        size = -(-self.flat.numel // ranks)
        made = _counted(self.step, self.slots)
        for name, (dtype, entries) in self.slots.items():
            storage = Storage(dtype, size, tuple(_run(entries, start, stop)))
            made[name] = Slot(storage, (size,))
        return made


_FlatGroup = tuple[dict[str, Any], list[_FlatState]]


def _flat_groups(state: Training, flats: Sequence[_Flat]) -> list[_FlatGroup]:
    """Hyper-parameters and flat parameters of each group, in the model's order."""
    optimizer = _optimizer(state)
    group_of = {
        member.fqn: (number, member)
        for number, group in enumerate(state.groups)
        for member in group.members
    }
    groups: list[_FlatGroup] = [
        ({name: value for name, value in group.items() if name != "params"}, [])
        for group in optimizer["param_groups"]
    ]
    for flat in flats:
        found = [group_of.get(weight.fqn) for _, weight in flat.members]
        owned = [each for each in found if each is not None]
        if not owned:
            continue
        numbers = {number for number, _ in owned}
        if len(numbers) > 1 or len(owned) < len(found):
            _refuse_unit(flat, found)
        (number,) = numbers
        members = [member for _, member in owned]
        groups[number][1].append(_flat_state(flat, members))
    return groups


def _refuse_unit(flat: _Flat, found: Sequence[tuple[int, Trained] | None]) -> None:
    numbers = [None if each is None else each[0] for each in found]
    at = next(i for i, number in enumerate(numbers) if number != numbers[0])
    first, other = (flat.members[i][1].fqn for i in (0, at))
    raise UnsupportedError(
        flat.unit.prefix or "the root's flat parameter",
        f"{first!r} and {other!r} would be one parameter of the optimizer, and are in different"
        " groups or not both trained",
        "write DCP or whole files, or wrap them apart",
    )


def _flat_state(flat: _Flat, members: Sequence[Trained]) -> _FlatState:
    stepped = [member for member in members if member.slots]
    if not stepped:
        return _FlatState(flat, {}, None)
    steps = {member.step for member in stepped}
    if len(steps) > 1:
        raise UnsupportedError(
            flat.unit.prefix or "the root's flat parameter",
            f"its members were stepped {sorted(map(str, steps))} times: one parameter has one step",
            "write DCP or whole files",
        )
    slots = {}
    for name in dict.fromkeys(name for member in stepped for name in member.slots):
        entries = []
        for (start, _), member in zip(flat.members, members, strict=True):
            entry = member.slots.get(name)
            if entry is not None:  # else never stepped: zero, as FSDP 1 itself has it
                entries.append((start, entry))
        widest = max((entry.dtype for _, entry in entries), key=lambda dtype: dtype.itemsize)
        slots[name] = (widest, tuple(entries))
    return _FlatState(flat, slots, steps.pop())


class _FlatOptimizer:
    """``use_orig_params=False``: flat parameters, numbered through the groups."""

    def __init__(self, state: Training, flats: Sequence[_Flat]) -> None:
        self._groups = _flat_groups(state, flats)

    def of(self, rank: int, ranks: int) -> dict[str, Any]:
        """One rank's."""
        groups = (
            (hyper, [(each.flat.key, each.values(rank, ranks)) for each in held])
            for hyper, held in self._groups
        )
        return written.listed(groups, named=False)


class _OrigOptimizer:
    """``use_orig_params=True``: what each rank has of each parameter, numbered as in the model."""

    def __init__(
        self, state: Training, model: ModelShapes, flats: Sequence[_Flat], compute: DType
    ) -> None:
        self._flats = flats
        self._compute = compute
        self._unsure = written.is_unsure(state)
        self._groups = [
            (written.hyper(state, group), held)
            for group, held in zip(
                state.groups, written.numbered(state, "index", model), strict=True
            )
        ]
        _optimizer(state)  # refuses what has no place

    def of(self, rank: int, ranks: int) -> dict[str, Any]:
        """One rank's; a parameter of which it has no element is listed and has no state."""
        runs = self._runs(rank, ranks)
        groups = (
            (hyper, [(member.fqn, _slices(member, *runs[member.fqn])) for member in members])
            for hyper, members in self._groups
        )
        return written.listed(groups, named=self._unsure)

    def _runs(self, rank: int, ranks: int) -> dict[str, tuple[int, int]]:
        """Which elements of each parameter lie on a rank."""
        found = {}
        for flat in self._flats:
            compute = flat.dtype if flat.unit.full_precision else self._compute
            members = [(weight.fqn, weight.shape) for _, weight in flat.members]
            starts, total = flat_param.place(
                members, aligned_to=flat_param.alignment(compute), ranks=ranks
            )
            low, high = equal_piece(total, ranks, rank)
            for fqn, shape in members:
                start = starts[fqn]
                stop = start + prod(shape)
                found[fqn] = (max(low, start) - start, min(high, stop) - start)
        return found


def _counted(step: float | None, slots: Collection[str]) -> dict[str, Slot | int]:
    """The step, as the optimizer counts it."""
    if step is None:
        return {}
    counter = written.counter(step, slots)
    return {"step": counter if isinstance(counter, int) else whole_slot(counter)}


def _slices(member: Trained, start: int, stop: int) -> dict[str, Slot | int]:
    if not member.slots or start >= stop:
        return {}
    made = _counted(member.step, member.slots)
    for name, entry in member.slots.items():
        parts = tuple(_run([(0, entry)], start, stop))
        made[name] = Slot(Storage(entry.dtype, stop - start, parts), (stop - start,))
    return made
