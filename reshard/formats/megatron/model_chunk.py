"""The share of a model that one model chunk of one rank holds: layers, experts, the ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from reshard.formats.megatron import parameter_order

T = TypeVar("T")

# The parts of a model: the embedding, the layers, the norm behind them, the layers of multi-token
# prediction (MTP), and what the last stage has.
Part = Literal["embedding", "layers", "norm", "mtp", "head"]


class Spot(NamedTuple):
    """The position of a parameter in the whole model.

    Args:
        part: the part of the model.
        layer: number of the layer among ``layers``.
        expert: number of the expert; None: not a parameter of an expert.
    """

    part: Part
    layer: int | None
    expert: int | None


def make_spot(fqn: str, layer: int | None, expert: int | None) -> Spot:
    """Return the position of a parameter.

    Args:
        layer: number of its layer; None: it is in no layer, or in one of multi-token prediction.
    """
    return Spot("layers" if layer is not None else parameter_order.find_part(fqn), layer, expert)


@dataclass(frozen=True, slots=True)
class ChunkShare:
    """The part of a model that a chunk holds.

    Args:
        experts: numbers of the experts of each layer.
        begins, ends: whether it is the first or the last chunk.
        has_norm: whether it has the norm behind the layers.
        has_mtp: whether it has the layers of multi-token prediction.
    """

    layers: range
    experts: range
    begins: bool
    ends: bool
    has_norm: bool
    has_mtp: bool

    def list_spots(self) -> Iterator[Spot]:
        """Yield every position in the share that a parameter may have."""
        if self.begins:
            yield Spot("embedding", None, None)
        for layer in self.layers:
            yield Spot("layers", layer, None)
            yield from (Spot("layers", layer, expert) for expert in self.experts)
        if self.has_norm:
            yield Spot("norm", None, None)
        if self.has_mtp:
            yield Spot("mtp", None, None)
            yield from (Spot("mtp", None, expert) for expert in self.experts)
        if self.ends:
            yield Spot("head", None, None)


def find_norm(layers: Sequence[int], *, mtp: bool) -> int:
    """Return the number of the chunk with the norm behind the layers.

    Source: Megatron-LM core_v0.16.1 ``core/transformer/transformer_block.py``
    (``has_final_layernorm_in_this_stage``).

    Args:
        layers: number of layers of each chunk.
        mtp: whether the model has layers of multi-token prediction.
    """
    last = len(layers) - 1
    return max((at for at, count in enumerate(layers) if count), default=last) if mtp else last


def make_share(at: int, layers: Sequence[range], experts: range, mtp_at: int | None) -> ChunkShare:
    """Return the share of one chunk.

    Args:
        at: number of the chunk.
        layers: the layers of each chunk.
        experts: as for `ChunkShare`.
        mtp_at: number of the chunk with the layers of multi-token prediction; None: there are none.
    """
    return ChunkShare(
        layers[at],
        experts,
        begins=at == 0,
        ends=at == len(layers) - 1,
        has_norm=at == find_norm([*map(len, layers)], mtp=mtp_at is not None),
        has_mtp=at == mtp_at,
    )


def list_experts(rank: int, ranks: int, experts: int) -> range:
    """Return the experts of each layer that one of several expert-parallel ranks holds."""
    share = experts // ranks
    return range(rank * share, (rank + 1) * share)


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
