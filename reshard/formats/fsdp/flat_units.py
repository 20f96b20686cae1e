"""Plan the flat parameters that FSDP 1 will have, and the position of each weight in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.containers.pickles.values import Call
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.box import flat_span, run_boxes
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats.parameter_kinds import build_is_divided
from reshard.layouts import flat_param
from reshard.layouts.partition import compute_equal_piece
from reshard.model import ModelShapes, Unit
from reshard.state_dict import torch_state_dict
from reshard.state_dict.sharded_writer import build_sharded_tensor
from reshard.training.state import Weight, WritableState


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat parameter: its members, each with its first element."""

    unit: Unit
    members: tuple[tuple[int, Weight], ...]
    numel: int
    dtype: DType

    @property
    def key(self) -> str:
        """Name of the flat parameter in the model's state dict."""
        return f"{self.unit.prefix}._flat_param" if self.unit.prefix else "_flat_param"

    def place_aligned(self, compute: DType, ranks: int) -> tuple[dict[str, int], int]:
        """Return each member's first element, and the size, with ``use_orig_params=True``.

        Args:
            compute: the dtype of the forward pass, by which members are aligned.
        """
        dtype = self.dtype if self.unit.full_precision else compute
        return flat_param.place_members(
            [(weight.fqn, weight.shape) for _, weight in self.members],
            aligned_to=flat_param.get_alignment(dtype),
            ranks=ranks,
        )

    def build_views(
        self, compute: DType, rank: int, ranks: int
    ) -> tuple[Call, dict[str, StorageView]]:
        """Return a rank's piece with ``use_orig_params=True``, and the members' slices of it.

        Padding counts as elements of the flat parameter, and a slice is a view of the piece: torch
        2.13 ``_flat_param.py`` (``_use_sharded_views``).
        """
        starts, numel = self.place_aligned(compute, ranks)
        pieces = [compute_equal_piece(numel, ranks, number) for number in range(ranks)]
        low, high = pieces[rank]
        entries = [(starts[weight.fqn], weight.value) for _, weight in self.members]
        storage = Storage(self.dtype, high - low, tuple(iterate_run(entries, low, high)))
        slices = {}
        for name, (at, entry) in zip(self.unit.members, entries, strict=True):
            start, stop = max(at, low), min(at + entry.numel, high)
            slices[name] = (
                StorageView(storage, (stop - start,), offset=start - low)
                if start < stop
                else StorageView(Storage(self.dtype, 0), (0,))
            )
        local = StorageView(storage, (high - low,))
        return build_sharded_tensor(self.dtype, numel, local, rank, pieces), slices

    def build_shard(self, rank: int, ranks: int) -> Call:
        """Return a rank's piece of the flat parameter, without padding."""
        pieces = [compute_equal_piece(self.numel, ranks, number) for number in range(ranks)]
        start, stop = pieces[rank]
        entries = [(at, weight.value) for at, weight in self.members]
        storage = Storage(self.dtype, stop - start, tuple(iterate_run(entries, start, stop)))
        local = StorageView(storage, (stop - start,)) if start < stop else None
        return build_sharded_tensor(self.dtype, self.numel, local, rank, pieces)


def iterate_run(
    entries: Sequence[tuple[int, Entry]], start: int, stop: int
) -> Iterator[StorageBlock]:
    """Yield what fills the run ``[start, stop)`` of a flat tensor of entries."""
    for at, entry in entries:
        first, last = max(at, start), min(at + entry.numel, stop)
        for box in run_boxes(entry.shape, first - at, last - at):
            offset = flat_span(box, entry.shape)[0] + at - start
            yield StorageBlock(entry.kind, entry.fqn, entry.shape, box, offset)


def exclude_ignored(state: WritableState, model: ModelShapes) -> ModelShapes:
    """Return the model with units that lack the parameters which the source's run did not shard."""
    weights = {weight.fqn: weight for weight in state.weights}
    is_divided = build_is_divided(state, model)
    units = []
    for unit in model.units:
        found = {fqn: _find_weight(state, weights, model, fqn) for fqn in unit.members}
        members = tuple(fqn for fqn, weight in found.items() if is_divided(weight))
        units.append(replace(unit, members=members))
    return replace(model, units=tuple(unit for unit in units if unit.members))


def find_ignored(state: WritableState, model: ModelShapes) -> dict[str, Weight]:
    """Return the weights of the parameters that are in no unit of a model, in its order."""
    weights = {weight.fqn: weight for weight in state.weights}
    members = {fqn for unit in model.units for fqn in unit.members}
    alone = (fqn for fqn in model.parameters if fqn not in members)
    return {fqn: _find_weight(state, weights, model, fqn) for fqn in alone}


def build_flats(state: WritableState, model: ModelShapes, dtype: DType | None) -> list[Flat]:
    """Build one flat parameter for each unit of the model, in its order.

    Args:
        dtype: dtype of the parameters; None keeps the dtype of each master.

    Raises:
        IncompleteError: the source lacks a parameter of the model.
        UsageError: the model lacks a weight of the source, or its wrapping is not known.
        UnsupportedError: no dtype of a unit's members can hold the values of all of them.
    """
    if not model.units:
        raise UsageError(
            model.source,
            "does not state how FSDP wraps the model",
            "pass --wrap with the wrapping of the new run",
        )
    weights = {weight.fqn: weight for weight in state.weights}
    flats = []
    for unit in model.units:
        weights_of_unit = [_find_weight(state, weights, model, fqn) for fqn in unit.members]
        starts, numel = flat_param.place_members(
            [
                (fqn, weight.shape)
                for fqn, weight in zip(unit.members, weights_of_unit, strict=True)
            ],
            aligned_to=1,
            ranks=1,
        )
        members = tuple(zip((starts[fqn] for fqn in unit.members), weights_of_unit, strict=True))
        flats.append(Flat(unit, members, numel, _choose_dtype(weights_of_unit, dtype)))
    _refuse_unknown_weights(state, model)
    return flats


def _find_weight(
    state: WritableState, weights: Mapping[str, Weight], model: ModelShapes, fqn: str
) -> Weight:
    aliases = (alias for alias, first in model.tied.items() if first == fqn)
    names = [fqn, *aliases]
    names += [kept for alias, kept in state.manifest.tied.items() if alias in names]
    weight = next((weights[name] for name in names if name in weights), None)
    if weight is None:
        raise IncompleteError(
            state.manifest.origin.path, f"has no {fqn!r}, but {model.source} has it"
        )
    if weight.shape != model.parameters[fqn]:
        raise UsageError(
            model.source,
            f"{fqn!r} is {model.parameters[fqn]} in it, but {weight.shape} in the checkpoint",
        )
    return weight


def _choose_dtype(members: Sequence[Weight], dtype: DType | None) -> DType:
    dtypes = [torch_state_dict.choose_weight_dtype(weight, dtype) for weight in members]
    widest = max(dtypes, key=lambda own: own.itemsize)
    # A narrower float fits into a wider one; float16 and bfloat16 do not fit into each other.
    are_floats = all(own.family == "float" for own in dtypes)
    fits = are_floats and all(d == widest or d.itemsize < widest.itemsize for d in dtypes)
    if not fits and len(set(dtypes)) > 1:
        number, other = next((n, d) for n, d in enumerate(dtypes) if d != dtypes[0])
        raise UnsupportedError(
            members[0].fqn,
            f"is {dtypes[0]}, but {members[number].fqn!r} of its unit is {other}, and a flat"
            " parameter has one dtype",
        )
    return widest


def _refuse_unknown_weights(state: WritableState, model: ModelShapes) -> None:
    known = model.parameters.keys() | model.buffers.keys() | model.tied.keys()
    for weight in state.weights:
        aliases = {alias for alias, kept in state.manifest.tied.items() if kept == weight.fqn}
        if not known & {weight.fqn, *aliases}:
            raise UsageError(model.source, f"has no {weight.fqn!r}, but the checkpoint has it")
