"""Turn the `Value` leaves of a state dict into the tensors of one rank's file."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from reshard.containers import torch_writer
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.containers.torch_writer import Part, Slot, Storage
from reshard.core.box import Box, Index, whole
from reshard.core.manifest import Skeleton
from reshard.layouts.mesh import MeshPlacements
from reshard.model import ModelShapes
from reshard.state_dict.sharded_writer import DTensorBuilder
from reshard.state_dict.torch_state_dict import Value, build_optimizer
from reshard.training.state import WritableState


class RankSharder:
    """Converts a tree, replacing each `Value` with the tensor that one rank saves."""

    def __init__(self, placements: MeshPlacements, rank: int) -> None:
        self._placements, self._rank = placements, rank
        self._dtensors = DTensorBuilder(placements.grid, rank)
        self._made: dict[int, Any] = {}  # id of a `Value` -> its tensor, which all names share
        self._shapes: dict[Index, Index] = {}

    def convert(self, value: Any) -> Any:
        """Convert a tree, or one leaf of it."""
        if isinstance(value, Value):
            if id(value) not in self._made:
                self._made[id(value)] = self._build_tensor(value)
            return self._made[id(value)]
        if isinstance(value, (dict, OrderedDict)):
            return type(value)((key, self.convert(item)) for key, item in value.items())
        return [self.convert(item) for item in value] if isinstance(value, list) else value

    def _build_tensor(self, value: Value) -> Any:
        placed = self._placements.get_placement(value.owner)
        if not value.divided or not placed.axes:
            return build_whole_slot(value)
        box = self._placements.grid.compute_box(value.shape, placed, self._rank)
        local = Slot(Storage(value.dtype, box.volume, _list_parts(value, box)), box.shape)
        # Equal shapes are one tuple, which the pickle stores once.
        shape = self._shapes.setdefault(value.shape, value.shape)
        return self._dtensors.build(shape, value.dtype, placed, local)


def _list_parts(value: Value, box: Box) -> tuple[Part, ...]:
    """Return the parts that fill a box of a tensor; none if the box is empty."""
    if value.entry is None or not box.volume:
        return ()
    return (Part(value.entry.kind, value.entry.fqn, value.shape, box),)


def build_whole_slot(value: Value) -> Slot:
    """Build a tensor that is stored whole."""
    storage = Storage(value.dtype, value.numel, _list_parts(value, whole(value.shape)), value.data)
    return Slot(storage, value.shape)


class WholeSlots:
    """Converts each `Value` to a tensor that is stored whole, once for each file."""

    def __init__(self) -> None:
        self._made: dict[int, Slot] = {}

    def __call__(self, value: Any) -> Slot | None:
        """Return the slot of a `Value`, the same one each time; None for anything else."""
        if not isinstance(value, Value):
            return None
        if id(value) not in self._made:
            self._made[id(value)] = build_whole_slot(value)
        return self._made[id(value)]


def lay_out_optimizer(
    state: WritableState, file: str, ranks: int, model: ModelShapes | None
) -> Skeleton:
    """Lay out ``torch.optim``'s state of whole tensors in one file, with names for its numbers."""
    root = build_optimizer(state, "index", model, named=True)
    return torch_writer.lay_out_object(
        file, Canonicalizer().convert(root), slot_of=WholeSlots(), stamp=state.stamp(file, 0, ranks)
    )
