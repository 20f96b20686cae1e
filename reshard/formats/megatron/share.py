"""The share of a model that one model chunk of one rank holds: layers, experts, the ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Spot(NamedTuple):
    """The position of a parameter in the whole model.

    Args:
        layer: number of the layer; None: before the first layer or after the last.
        expert: number of the expert; None: not a parameter of an expert.
        begins: whether a parameter outside the layers comes before them.
    """

    layer: int | None
    expert: int | None
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ChunkShare:
    """The part of a model that a chunk holds.

    Args:
        experts: numbers of the experts of each layer.
        begins, ends: whether it has the parameters before the layers, and those after them.
    """

    layers: range
    experts: range
    begins: bool
    ends: bool

    def list_spots(self) -> Iterator[Spot]:
        """Yield every position in the share that a parameter may have."""
        if self.begins:
            yield Spot(None, None, begins=True)
        for layer in self.layers:
            yield Spot(layer, None)
            yield from (Spot(layer, expert) for expert in self.experts)
        if self.ends:
            yield Spot(None, None)
            # Layers of multi-token prediction (MTP), which may have experts, follow the last layer.
            yield from (Spot(None, expert) for expert in self.experts)


def list_experts(rank: int, ranks: int, experts: int) -> range:
    """Return the experts of each layer that one of several expert-parallel ranks holds."""
    each = experts // ranks
    return range(rank * each, (rank + 1) * each)


class ParameterIndex(Generic[T]):
    """The parameters of a whole model, for lookup by share."""

    def __init__(self, parameters: Iterable[tuple[Spot, T]]) -> None:
        self._parameters: dict[Spot, list[T]] = defaultdict(list)
        for spot, parameter in parameters:
            self._parameters[spot].append(parameter)

    def find(self, share: ChunkShare) -> Iterator[T]:
        """Yield the parameters in a share, in their order at each position."""
        for spot in share.list_spots():
            yield from self._parameters.get(spot, ())
