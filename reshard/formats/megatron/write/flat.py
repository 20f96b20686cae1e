"""The distributed optimizer's flat buffers: of each rank, and in torch_dist as dp_reshardable.

A bucket is one flat tensor in torch_dist, with a piece for each parameter and each gap before one.
Megatron writes further pieces where its data-parallel ranks meet; it loads any division.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/distrib_optimizer.py`` (``sharded_state_dict``,
``sharded_param_state_dp_reshardable``), ``core/optimizer/optimizer.py`` (``ChainedOptimizer``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from reshard.containers.pickles.values import Global
from reshard.containers.torch_writer import Storage
from reshard.core.box import Box
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import Entry
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.dcp.writer import PiecedTensor, StoredObject
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.optimizers.buckets import Bucket, Param, make_buckets
from reshard.formats.megatron.write import chain
from reshard.formats.megatron.write.args import REDUCES_IN_FP32
from reshard.formats.megatron.write.ranks import LocalWeight, WriterRank, list_ranks
from reshard.formats.megatron.write.resolved import Resolved
from reshard.units import round_up

FORM = "dp_reshardable"
SLOTS = ("param", "exp_avg", "exp_avg_sq")
_BUCKET = 128  # a bucket is a multiple of this and of the ranks that share it
_OTHER_FORM = "write --optim-sharding fully_reshardable"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat buffer of a rank: weights of one model chunk, dtype and kind (dense, expert).

    Args:
        dtypes: of the parameters, and of their gradients.
        weights: in the order of the buffer: from the last to the first.
    """

    dtypes: tuple[DType, DType]
    weights: tuple[LocalWeight, ...]
    buckets: tuple[Bucket, ...]

    @property
    def key(self) -> tuple[Global, ...]:
        """The key that states its dtypes."""
        return tuple(Global(f"torch.{dtype.name}") for dtype in self.dtypes)


def list_buffers(
    choice: Resolved, rank: WriterRank, chunks: Sequence[Sequence[LocalWeight]], *, experts: bool
) -> list[Buffer]:
    """Return the buffers of a rank's dense parameters, or of its experts.

    Source: core_v0.16.1 ``distributed_data_parallel.py``
    (``_allocate_buffers_for_parameters``).

    Args:
        chunks: the weights of each model chunk.
    """
    args, groups = Arguments("", choice.args), choice.groups
    buffers = []
    for number, chunk in enumerate(chunks):
        by_dtype: dict[DType, list[LocalWeight]] = {}
        for local in chunk:
            fqn = local.known.weight.fqn
            if fqn in groups.members and (fqn in groups.experts) is experts:
                by_dtype.setdefault(choice.stored(local.known.weight)[1], []).append(local)
        for dtype, weights in by_dtype.items():
            params = [Param(local.name, local.shape, alone=local.shared) for local in weights]
            size = args.get_bucket_size(stage=rank.stage, chunk=number)
            buffers.append(
                Buffer(
                    (dtype, FLOAT32 if args.flag(REDUCES_IN_FP32) else dtype),
                    tuple(reversed(weights)),
                    tuple(make_buckets(params, size)),
                )
            )
    return buffers


def find_entry(choice: Resolved, local: LocalWeight, slot: str) -> Entry | None:
    """Return the entry that fills a slot of a weight in a buffer; None if it is all zeros."""
    if slot == SLOTS[0]:
        return local.known.weight.value
    return choice.groups.members[local.known.weight.fqn].slots.get(slot)


def lay_out_buckets(choice: Resolved) -> Iterator[tuple[str, PiecedTensor | StoredObject]]:
    """Yield what torch_dist has of the optimizer in dp_reshardable, by its keys.

    Raises:
        UsageError: more ranks share an expert than share a layer.
        UnsupportedError: a pipeline stage has no experts, but others have.
    """
    sizes = choice.wanted.sizes
    sharing = sizes.expert_tensor or sizes.tensor
    if sharing > sizes.tensor:
        raise UsageError(
            f"--etp {sharing}", f"is more than --tp {sizes.tensor} with dp_reshardable", _OTHER_FORM
        )
    kinds = [False, *([True] if choice.groups.experts else [])]
    done = set()
    for rank in list_ranks(sizes):
        chunks = [choice.places.list_chunk_weights(rank, at) for at in range(sizes.virtual)]
        fqns = [local.known.weight.fqn for chunk in chunks for local in chunk]
        states = chain.make_states(choice, lambda _: ({}, {}), fqns)
        found = [list_buffers(choice, rank, chunks, experts=experts) for experts in kinds]
        if len(states) != len(kinds) or not all(found):
            raise UnsupportedError(
                choice.state.manifest.origin.path,
                f"has no experts on pipeline stage {rank.stage}, and reshard does not know how"
                " Megatron numbers its optimizers there",
                _OTHER_FORM,
            )
        for number, (experts, state, buffers) in enumerate(zip(kinds, states, found, strict=True)):
            if experts:  # groups are numbered by tensor rank, then expert rank, then stage
                group = rank.expert_tensor + sharing * (rank.expert + sizes.expert * rank.stage)
            else:
                group = rank.tensor + sizes.tensor * rank.stage
            prefix = f"chained_{number}." if len(kinds) > 1 else ""
            prefix += f"optimizer.distributed.dp_group_idx_{group}"
            if prefix not in done:
                done.add(prefix)
                yield from _lay_out_group(choice, prefix, state, buffers, number=len(done) - 1)


def _lay_out_group(
    choice: Resolved, prefix: str, state: chain.State, buffers: Sequence[Buffer], *, number: int
) -> Iterator[tuple[str, PiecedTensor | StoredObject]]:
    numels = [[bucket.numel for bucket in buffer.buckets] for buffer in buffers]
    multiple = lcm(_BUCKET, choice.wanted.data_parallel)
    padded = [[round_up(numel, multiple) for numel in own] for own in numels]
    counts = {"per_bucket_numel": padded, "per_bucket_numel_unpadded": numels}
    stated = {
        name: [{buffer.key: value} for buffer, value in zip(buffers, values, strict=True)]
        for name, values in counts.items()
    }
    for name, value in {**state, **stated}.items():
        yield f"{prefix}.{name}/shard_0_1", StoredObject([value])
    for at, buffer in enumerate(buffers):
        dtypes = ", ".join(f"torch.{dtype.name}" for dtype in buffer.dtypes)
        for index, bucket in enumerate(buffer.buckets):
            key = f"{prefix}.gbuf_idx_{at}.dtype_({dtypes}).bucket_idx_{index}"
            for slot in SLOTS:
                pieces = tuple(_list_pieces(choice, buffer, bucket, slot))
                yield f"{key}.{slot}", PiecedTensor(FLOAT32, (bucket.numel,), pieces, number)


def _list_pieces(
    choice: Resolved, buffer: Buffer, bucket: Bucket, slot: str
) -> Iterator[tuple[Box, Storage]]:
    weights = {local.name: local for local in buffer.weights}
    end = 0
    for member in bucket.members:
        entry = find_entry(choice, weights[member.fqn], slot)
        parts: Any = () if entry is None else weights[member.fqn].parts(entry)
        for start, stop, own in (
            (end, member.start, ()),
            (member.start, member.stop, tuple(parts)),
        ):
            if stop > start:
                yield Box((start,), (stop - start,)), Storage(FLOAT32, stop - start, own)
        end = member.stop
    if bucket.numel > end:
        yield Box((end,), (bucket.numel - end,)), Storage(FLOAT32, bucket.numel - end)
