"""Pieces of parameters in a flat tensor: the same places for masters and for every slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from reshard.box import Box, run_boxes
from reshard.containers.torch_writer import Part, Storage
from reshard.dtypes import DType
from reshard.manifest import Entry
from reshard.training.state import TrainedParameter

Value = Callable[[TrainedParameter], Entry | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a parameter that stands in a flat tensor.

    Args:
        offset: the element of the tensor at which it begins.
        boxes: the run's, each with the element at which it begins in the tensor.
    """

    member: TrainedParameter
    offset: int
    numel: int
    boxes: tuple[tuple[Box, int], ...]


def piece(member: TrainedParameter, start: int, stop: int, offset: int) -> Piece:
    """The run ``[start, stop)`` of a parameter, from element ``offset`` on."""
    boxes = tuple(_placed(member.weight.value, start, stop, offset))
    return Piece(member, offset, stop - start, boxes)


def storage(dtype: DType, numel: int, pieces: Iterable[Piece], value: Value) -> Storage:
    """A flat tensor's content; zeros where a parameter has no such value."""
    return Storage(dtype, numel, tuple(_parts(pieces, value)))


def run_of(entry: Entry, start: int, stop: int) -> tuple[Part, ...]:
    """The run ``[start, stop)`` of an entry, in a tensor of its own."""
    return tuple(_part(entry, box, at) for box, at in _placed(entry, start, stop, 0))


def _parts(pieces: Iterable[Piece], value: Value) -> Iterator[Part]:
    for held in pieces:
        entry = value(held.member)
        if entry is not None:
            for box, at in held.boxes:
                yield _part(entry, box, at)


def _part(entry: Entry, box: Box, at: int) -> Part:
    return Part(entry.kind, entry.fqn, entry.shape, box, at)


def _placed(entry: Entry, start: int, stop: int, at: int) -> Iterator[tuple[Box, int]]:
    for box in run_boxes(entry.shape, start, stop):
        yield box, at
        at += box.volume
