"""What each model-parallel rank holds of every weight: its local name, shape and blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from reshard.box import Box, Index, intersect, whole
from reshard.dtypes import DType
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.megatron import order
from reshard.formats.torch_writer import Part, Slot, Storage
from reshard.formats.training import Training, Weight
from reshard.manifest import Entry
from reshard.model_parallel import shards, stages
from reshard.model_parallel.rules import Found, Table
from reshard.model_parallel.shards import Split
from reshard.model_parallel.sizes import Sizes

_EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_FIRST = ("embedding.",)
_LAST = ("decoder.final_layernorm.", HEAD)


@dataclass(frozen=True, slots=True)
class Known:
    """A weight that the table knows.

    Args:
        split: how tensor-parallel ranks share it.
        shape: of the whole tensor as Megatron has it: with the padding of the vocabulary.
    """

    weight: Weight
    found: Found
    split: Split
    shape: Index

    @property
    def layer(self) -> int | None:
        """The number of its layer in the whole model."""
        number = self.found.fields.get("i")
        return number if isinstance(number, int) else None

    @property
    def expert(self) -> int | None:
        """The number of its expert in the whole layer."""
        number = self.found.fields.get("e")
        return number if isinstance(number, int) else None


@dataclass(frozen=True, slots=True)
class Local:
    """A weight on one rank.

    Args:
        name: in the rank's own module.
        shape: of the rank's tensor.
        blocks: (block of the whole tensor, block of the rank's).
        shared: whether the first and the last stage train it together (tied embedding).
    """

    name: str
    known: Known
    shape: Index
    blocks: tuple[tuple[Box, Box], ...]
    shared: bool = False

    @property
    def numel(self) -> int:
        """Elements of the rank's tensor."""
        return prod(self.shape)

    def slot(self, entry: Entry, dtype: DType) -> Slot:
        """The rank's piece of an entry that has the weight's shape; padding is zero."""
        return Slot(Storage(dtype, self.numel, tuple(self.parts(entry))), self.shape)

    def parts(self, entry: Entry, at: int = 0) -> Iterator[Part]:
        """The same, from an element of a flat storage on."""
        row = prod(self.shape[1:])
        for block, local in self.blocks:
            held = intersect(block, whole(entry.shape)) if block.volume else None
            if held is None:
                continue
            offset = local.origin[0] * row if self.shape else 0
            yield Part(entry.kind, entry.fqn, entry.shape, held, at + offset)


def known(
    state: Training, table: Table, constants: Mapping[str, int], *, gated: bool, padded: int | None
) -> list[Known]:
    """Every weight with its rule.

    Args:
        padded: rows of the vocabulary with its padding; None: as they are.

    Raises:
        UsageError: a weight that no rule names.
        UnsupportedError: a weight of another shape than its rule can cut.
    """
    found = []
    for weight in state.weights:
        rule = table.need(weight.fqn, constants)
        split = rule.rule.split(gated=gated)
        if split.dim is not None and split.dim >= len(weight.shape):
            raise UnsupportedError(
                f"{weight.fqn!r}", f"has shape {weight.shape}, and is to be cut on dim {split.dim}"
            )
        shape = weight.shape
        if split.padded and padded is not None:
            shape = (padded, *shape[1:])
        found.append(Known(weight, rule, split, shape))
    return found


@dataclass(frozen=True, slots=True)
class Rank:
    """A model-parallel rank, by its number on each axis.

    Args:
        place: the first rank of its stage that is all of this.
    """

    tensor: int
    stage: int
    expert: int
    expert_tensor: int
    place: int

    @property
    def is_first(self) -> bool:
        """Whether it is the first of those that hold the same dense layers, which reads for all."""
        return self.place == self.tensor


def ranks(sizes: Sizes) -> list[Rank]:
    """Those that write a file.

    Dense layers lie over ranks as tensor, then data; experts as expert tensor, then expert (core
    ``parallel_state.py``, ``initialize_model_parallel``: "tp-cp-ep-dp-pp").
    """
    each = sizes.expert_tensor or sizes.tensor
    places = {
        (r % sizes.tensor, r // each % sizes.expert): r
        for r in reversed(range(lcm(sizes.tensor, each * sizes.expert)))
    }
    return [
        Rank(tensor, stage, expert, place % each, place)
        for (tensor, expert), place in sorted(places.items())
        for stage in range(sizes.pipeline)
    ]


@dataclass(frozen=True, slots=True)
class Places:
    """Who holds what.

    Args:
        counts: layers of each stage (and chunk); None: as many in each.
        dialect: of the module's names: ``te`` or ``local``.
    """

    sizes: Sizes
    layers: int
    experts: int
    dialect: str
    tied: bool
    counts: Sequence[int] | None = None

    def of_chunk(self, weights: Sequence[Known], rank: Rank, chunk: int) -> list[Local]:
        """The weights of one model chunk of one rank, in the module's order."""
        chunks = stages.chunks(self.sizes)
        at = chunks.index((rank.stage, chunk))
        held = stages.layers(self.sizes, self.layers, self.counts)[at]
        is_first, is_last = at == 0, at == len(chunks) - 1
        moe = {known.layer for known in weights if known.expert is not None}
        found = []
        for known in weights:
            name = known.found.name
            if known.layer is None:
                here = (is_first and name.startswith(_FIRST)) or (
                    is_last and name.startswith(_LAST)
                )
            else:
                here = known.layer in held and self._has_expert(known, rank.expert)
            if here:
                found.append(self._local(known, held.start, rank, moe))
            if name == _EMBEDDING and self.tied and is_last and not is_first:
                copy = self._local(known, 0, rank, moe)
                found.append(replace(copy, name=HEAD, shared=True))
            if name == _EMBEDDING and self.tied and is_first and self.sizes.pipeline > 1 and here:
                found[-1] = replace(found[-1], shared=True)
        return sorted(found, key=lambda local: order.place(local.name))

    def _has_expert(self, known: Known, rank: int) -> bool:
        each = self._experts_each
        return known.expert is None or known.expert // each == rank

    @property
    def _experts_each(self) -> int:
        if self.experts % self.sizes.expert:
            raise UsageError(
                f"expert parallel size {self.sizes.expert}",
                f"does not divide the model's {self.experts} experts",
            )
        return max(self.experts // self.sizes.expert, 1)

    def _local(self, known: Known, first_layer: int, rank: Rank, moe: set[int | None]) -> Local:
        fields = dict(known.found.fields)
        if known.layer is not None:
            fields["i"] = known.layer - first_layer
        if known.expert is not None:
            fields["e"] = known.expert - rank.expert * self._experts_each
        local = replace(known.found, fields=fields)
        dialect = self.dialect
        if known.layer in moe and ".pre_mlp_layernorm." in known.found.name:
            dialect = "local"  # no fused linear follows it in a layer of experts
        name = local.spelled(dialect, {})
        size, place = self.sizes.tensor, rank.tensor
        if known.expert is not None:
            size, place = self.sizes.expert_tensor or size, rank.expert_tensor
        shape, blocks = shards.blocks(name, known.shape, known.split, size, place)
        return Local(name, known, shape, blocks)
