"""What one model chunk of one rank has of a model: some layers, some experts, perhaps an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Spot(NamedTuple):
    """Where a parameter stands in the whole model.

    Args:
        layer: None: before the first layer or after the last.
        expert: None: not of an expert.
        begins: of what is in no layer, whether it stands before them.
    """

    layer: int | None
    expert: int | None
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ChunkShare:
    """The part that a chunk has.

    Args:
        experts: of each layer, those whose numbers are here.
        begins, ends: whether it has what stands before the layers, and after them.
    """

    layers: range
    experts: range
    begins: bool
    ends: bool

    def list_spots(self) -> Iterator[Spot]:
        """Every place in it that a parameter may have."""
        if self.begins:
            yield Spot(None, None, begins=True)
        for layer in self.layers:
            yield Spot(layer, None)
            yield from (Spot(layer, expert) for expert in self.experts)
        if self.ends:
            yield Spot(None, None)


def list_experts(rank: int, ranks: int, experts: int) -> range:
    """The experts that one of several expert-parallel ranks has of each layer."""
    each = experts // ranks
    return range(rank * each, (rank + 1) * each)


class ParameterIndex(Generic[T]):
    """The parameters of a whole model, to be found by share: not every rank looks at all."""

    def __init__(self, parameters: Iterable[tuple[Spot, T]]) -> None:
        self._held: dict[Spot, list[T]] = defaultdict(list)
        for spot, parameter in parameters:
            self._held[spot].append(parameter)

    def find(self, share: ChunkShare) -> Iterator[T]:
        """Those in a share; of each spot in their order."""
        for spot in share.list_spots():
            yield from self._held.get(spot, ())
