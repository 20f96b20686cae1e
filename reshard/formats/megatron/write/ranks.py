"""The local name, shape and blocks of every weight on each model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.box import Box, Index, intersect, whole
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.megatron import names, parameter_order
from reshard.formats.megatron.arguments import Arguments, has_own_configs
from reshard.formats.megatron.model_chunk import (
    ChunkShare,
    ParameterIndex,
    Spot,
    list_experts,
    make_share,
    make_spot,
)
from reshard.layouts.model_parallel import shards
from reshard.layouts.model_parallel.patterns import Pattern
from reshard.layouts.model_parallel.rules import RuleMatch, Table
from reshard.layouts.model_parallel.shards import Split
from reshard.layouts.model_parallel.sizes import Sizes, assign_layers, list_chunks
from reshard.training.state import Weight, WritableState

HEAD = names.OUTPUT


@dataclass(frozen=True, slots=True)
class KnownWeight:
    """A weight that the table knows.

    Args:
        split: how tensor-parallel ranks share it.
        shape: shape of the whole tensor in Megatron, with the padding of the vocabulary.
        dialect: the dialect of the source's name, if the output keeps it.
    """

    weight: Weight
    found: RuleMatch
    split: Split
    shape: Index
    dialect: str | None = None

    @property
    def layer(self) -> int | None:
        """The number of its layer in the whole model."""
        number = self.found.fields.get("i")
        return number if isinstance(number, int) else None

    @property
    def mtp(self) -> int | None:
        """The number of its layer among those of multi-token prediction (MTP)."""
        number = self.found.fields.get("m")
        return number if isinstance(number, int) else None

    @property
    def spot(self) -> Spot:
        """Its position in the model."""
        return make_spot(self.found.name, self.layer, self.expert)

    @property
    def expert(self) -> int | None:
        """The number of its expert in the whole layer."""
        number = self.found.fields.get("e")
        return number if isinstance(number, int) else None


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """A weight on one rank.

    Args:
        blocks: (block of the whole tensor, block of the rank's).
        shared: whether the first and the last stage train it together (tied embedding).
    """

    name: str
    known: KnownWeight
    shape: Index
    blocks: tuple[tuple[Box, Box], ...]
    shared: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the rank's tensor."""
        return prod(self.shape)

    def slot(self, entry: Entry, dtype: DType) -> StorageView:
        """Return the rank's piece of an entry of the weight's shape; padding is zero."""
        return StorageView(Storage(dtype, self.numel, tuple(self.parts(entry))), self.shape)

    def parts(self, entry: Entry, at: int = 0) -> Iterator[StorageBlock]:
        """Yield the parts of the rank's piece, from an element of a flat storage on."""
        row = prod(self.shape[1:])
        for block, local in self.blocks:
            common = intersect(block, whole(entry.shape)) if block.volume else None
            if common is None:
                continue
            offset = local.origin[0] * row if self.shape else 0
            yield StorageBlock(entry.kind, entry.fqn, entry.shape, common, at + offset)


def find_rules(
    state: WritableState,
    table: Table,
    constants: Mapping[str, int],
    *,
    gated: bool,
    te: bool,
    padded: int | None,
    args: Mapping[str, Any],
    keeps_names: bool,
) -> list[KnownWeight]:
    """Return every weight with its rule.

    Args:
        te: whether the output's layers are Transformer Engine's.
        padded: rows of the vocabulary with its padding; None: as they are.
        keeps_names: whether the output keeps the names of the source's files.

    Raises:
        UsageError: no rule names a weight.
        UnsupportedError: a weight lacks the dim along which its rule cuts.
    """
    known = []
    for weight in state.weights:
        rule = table.require(weight.fqn, constants)
        source = state.manifest.origin.path
        split = rule.rule.split(gated=gated, te=te, args=args, source=source)
        if split.dim is not None and split.dim >= len(weight.shape):
            raise UnsupportedError(
                f"{weight.fqn!r}",
                f"has shape {weight.shape}, which cannot be cut on dim {split.dim}",
            )
        shape = weight.shape
        if split.padded and padded is not None:
            shape = (padded, *shape[1:])
        dialect = _find_dialect(rule) if keeps_names else None
        known.append(KnownWeight(weight, rule, split, shape, dialect))
    return known


def _find_dialect(found: RuleMatch) -> str | None:
    if found.pattern in found.rule.others.get("te", ()):
        return "te"
    return "local" if found.pattern == found.rule.name else None


@dataclass(frozen=True, slots=True)
class WriterRank:
    """A model-parallel rank, by its number on each axis.

    Args:
        place: the first rank of its stage that has these numbers.
    """

    tensor: int
    stage: int
    expert: int
    expert_tensor: int
    place: int

    @property
    def is_first(self) -> bool:
        """Whether it is the first rank with its dense layers, whose file has their buffers."""
        return self.place == self.tensor


def list_ranks(sizes: Sizes) -> list[WriterRank]:
    """Return the ranks that write a file.

    Dense layers are assigned to ranks as tensor, then data; experts as expert tensor, then expert
    (core ``parallel_state.py``, ``initialize_model_parallel``: "tp-cp-ep-dp-pp").
    """
    sharing = sizes.expert_tensor or sizes.tensor
    # After this many ranks the positions repeat.
    # In reverse, so that the dict keeps the first rank of each position.
    places = {
        (r % sizes.tensor, r // sharing % sizes.expert): r
        for r in reversed(range(lcm(sizes.tensor, sharing * sizes.expert)))
    }
    return [
        WriterRank(tensor, stage, expert, place % sharing, place)
        for (tensor, expert), place in sorted(places.items())
        for stage in range(sizes.pipeline)
    ]


class WeightLocations:
    """The ranks that hold each weight.

    Args:
        counts: number of layers of each stage (and chunk); None: the same in each.
        args: the arguments of the run.
        dialect: of the module's names: ``te`` or ``local``.
        grouped: whether a module holds all experts of a rank (``moe_grouped_gemm``).
        mtp_at: number of the chunk with the layers of multi-token prediction; None: the last one.
    """

    def __init__(
        self,
        weights: Sequence[KnownWeight],
        sizes: Sizes,
        *,
        dialect: str,
        tied: bool,
        counts: Sequence[int] | None,
        args: Arguments,
        grouped: bool,
        mtp_at: int | None = None,
    ) -> None:
        self.grouped = grouped
        self._args = args
        last = max((known.layer for known in weights if known.layer is not None), default=-1)
        # Layers with configurations of their own may have no parameters.
        stated = args.number("num_layers") if has_own_configs(args.values) else 0
        self.layers = max(1 + last, stated)
        self._experts = 1 + max((w.expert for w in weights if w.expert is not None), default=-1)
        self._sizes = sizes
        self._dialect = dialect
        self._names = {known.found.name for known in weights}
        self._chunks = list_chunks(sizes)
        self._counts = counts
        self._model = ParameterIndex((known.spot, known) for known in weights)
        embedding = next((known for known in weights if known.found.name == names.EMBEDDING), None)
        self._tied = embedding if tied else None  # what the last stage has once more
        self.mtp = 1 + max((known.mtp for known in weights if known.mtp is not None), default=-1)
        self._looked_up = embedding if self.mtp else None  # by its MTP layers
        last_chunk = len(self._chunks) - 1
        self._mtp_at = (last_chunk if mtp_at is None else mtp_at) if self.mtp else None

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self._experts > 0

    def choose_dialect(self, known: KnownWeight, dialect: str) -> str:
        """Return the dialect of a parameter's name, in a model most of whose names are in this one.

        A norm is part of the linear layer behind it, if there is one. Before experts and before
        latent attention it is a separate module.

        Transformer Engine names experts by groups where ``moe_grouped_gemm`` is on, else one by one
        as Megatron's own layers do (core_v0.16.1 ``transformer/moe/experts.py``, ``TEGroupedMLP``
        and ``SequentialMLP``).
        """
        if known.expert is not None and not self.grouped:
            return "local"
        if self._find_te(known) is None:
            return "local"
        return dialect if known.expert is not None else known.dialect or dialect

    def spell(self, known: KnownWeight, dialect: str) -> str:
        """Return the name of a weight of the whole model in a dialect.

        Args:
            dialect: one that `choose_dialect` returned.
        """
        return self._choose_pattern(known, dialect).fill(known.found.fields)

    def _choose_pattern(self, known: KnownWeight, dialect: str) -> Pattern:
        te = self._find_te(known) if dialect == "te" else None
        return te or known.found.rule.get_patterns(dialect)[0]

    def _find_te(self, known: KnownWeight) -> Pattern | None:
        return names.find_te_pattern(known.found, self._names)

    def is_latent(self, known: KnownWeight) -> bool:
        """Whether the layer of a weight has latent attention (MLA)."""
        layer = known.found.name.partition("layernorm.")[0].rpartition(".")[0]
        return f"{layer}.self_attention.linear_kv_up_proj.weight" in self._names

    def list_chunk_weights(self, rank: WriterRank, chunk: int) -> list[LocalWeight]:
        """Return the weights of one model chunk of one rank, in the module's order."""
        at = self._chunks.index((rank.stage, chunk))
        layers = assign_layers(self._sizes, self.layers, self._counts)
        share = make_share(at, layers, self.list_rank_experts(rank), self._mtp_at)
        own = [self._place_weight(known, share, rank) for known in self._model.find(share)]
        copied = self._looked_up or self._tied
        if copied and self._sizes.pipeline > 1:
            own = [replace(x, shared=x.known is copied) for x in own]
        if self._looked_up and share.has_mtp and not share.begins:
            own.append(replace(self._place_weight(self._looked_up, share, rank), shared=True))
        if self._tied and share.ends and not share.begins:
            own.append(replace(self._place_weight(self._tied, share, rank), name=HEAD, shared=True))
        return sorted(own, key=lambda local: parameter_order.sort_key(local.name))

    def list_rank_experts(self, rank: WriterRank) -> range:
        """Return the numbers of the experts of each layer that a rank holds.

        Raises:
            UsageError: the ranks do not divide the experts.
        """
        if self._experts % self._sizes.expert:
            raise UsageError(
                f"expert parallel size {self._sizes.expert}",
                f"does not divide the model's {self._experts} experts",
            )
        return list_experts(rank.expert, self._sizes.expert, self._experts)

    def _place_weight(self, known: KnownWeight, share: ChunkShare, rank: WriterRank) -> LocalWeight:
        dialect = self.choose_dialect(known, self._dialect)
        pattern = self._choose_pattern(known, dialect)
        fields = dict(known.found.fields)
        if known.layer is not None:
            fields["i"] = known.layer - share.layers.start
        if known.expert is not None:
            fields["e"] = known.expert - share.experts.start
        name = parameter_order.spell(pattern.fill(fields), self._args)
        size, number = self._sizes.tensor, rank.tensor
        if known.expert is not None:
            size, number = self._sizes.expert_tensor or size, rank.expert_tensor
        shape, blocks = shards.list_blocks(name, known.shape, known.split, size, number)
        return LocalWeight(name, known, shape, blocks)
