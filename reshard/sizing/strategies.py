"""The bytes of each strategy on a GPU, on a host, on disk and between the GPUs.

With P trained parameters on N data-parallel ranks, 16-bit training with Adam keeps 2P of
parameters, 2P of gradients and 12P of fp32 masters and moments; a ZeRO stage divides by N what it
partitions (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5). What the frameworks keep beside that is from DeepSpeed 0.19
(``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``) and torch
2.13 (``distributed/fsdp/_fully_shard``, ``nn/parallel/distributed.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reshard.sizing.model import ModelSizes
from reshard.sizing.rank_share import RankShare, take_share
from reshard.sizing.setup import (
    STATE_BYTES,
    Cluster,
    Training,
    count_accumulation,
    count_data_ranks,
)

MARGIN = 0.08
"""Part of a GPU that is left free, for the CUDA context, NCCL and fragmentation.

On an H100 (80 GB), context and NCCL of one rank took 1.4 GB, and the allocator reserved up to 4 GB
more than the peak.
"""

BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of ``reduce_bucket_size`` and ``allgather_bucket_size``: elements."""

LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of ``stage3_max_live_parameters``: gathered elements at a time."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a model is distributed over the data-parallel ranks.

    Args:
        framework: deepspeed or torch.
        stage: what is partitioned: 0 nothing, 1 the optimizer, 2 also gradients, 3 also parameters.
        offload_optimizer: masters, moments and gradients are in the memory of the host.
        offload_param: parameters are, too.
        within_node: ranks of one node partition, and nodes are replicas of each other.
    """

    name: str
    framework: str
    stage: int
    offload_optimizer: bool = False
    offload_param: bool = False
    within_node: bool = False

    @property
    def layout(self) -> str:
        """The layout of `split` that the framework loads, whatever the number of ranks is."""
        return "deepspeed" if self.framework == "deepspeed" else "dcp"


STRATEGIES = (
    Strategy("ddp", "torch", 0),
    Strategy("hsdp", "torch", 3, within_node=True),
    Strategy("fsdp", "torch", 3),
    Strategy("zero1", "deepspeed", 1),
    Strategy("zero2", "deepspeed", 2),
    Strategy("zero2-offload", "deepspeed", 2, offload_optimizer=True),
    Strategy("zero3", "deepspeed", 3),
    Strategy("zero3-offload-optimizer", "deepspeed", 3, offload_optimizer=True),
    Strategy("zero3-offload", "deepspeed", 3, offload_optimizer=True, offload_param=True),
)
"""In the order in which they are tried."""

NAMES = tuple(strategy.name for strategy in STRATEGIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyForecast:
    """The forecast of one strategy. All sizes are in bytes.

    Args:
        parameters, gradients, masters, moments: model states on a GPU.
        gathered: parameters that are gathered for the layers that run now.
        logits: logits, their float32 copy and the gradients of both.
        step: copies that the optimizer step makes.
        margin: memory that is left free.
        activations: what the forward pass saves; ``recomputed`` with activation checkpointing.
        host: memory of a node.
        disk: a checkpoint of all ranks.
        sent: bytes that a GPU sends in a step.
    """

    strategy: Strategy
    parameters: int
    gradients: int
    masters: int
    moments: int
    gathered: int
    buckets: int
    activations: int
    recomputed: int
    logits: int
    step: int
    margin: int
    host: int
    disk: int
    sent: int

    @property
    def states(self) -> int:
        """Parameters, gradients, masters and moments."""
        return self.parameters + self.gradients + self.masters + self.moments

    def count_backward(self, *, checkpointing: bool) -> int:
        """Return what the backward pass needs beside the states."""
        activations = self.recomputed if checkpointing else self.activations
        return self.gathered + self.buckets + activations + self.logits

    def count_total(self, *, checkpointing: bool) -> int:
        """Return the largest sum during a step: in the backward pass, or in the optimizer step."""
        backward = self.count_backward(checkpointing=checkpointing)
        return self.states + max(backward, self.step) + self.margin

    def list_lacks(self, cluster: Cluster, *, checkpointing: bool) -> list[str]:
        """Return whose memory is too small: the GPU's, and the host's if its size is known."""
        lacks = ["GPU"] if self.count_total(checkpointing=checkpointing) > cluster.gpu_bytes else []
        if cluster.host_bytes is not None and self.host > cluster.host_bytes:
            lacks.append("host")
        return lacks

    def fits(self, cluster: Cluster, *, checkpointing: bool) -> bool:
        """Return whether a GPU, and a host if its memory is known, have enough memory."""
        return not self.list_lacks(cluster, checkpointing=checkpointing)


def forecast(model: ModelSizes, cluster: Cluster, training: Training) -> list[StrategyForecast]:
    """Return the forecast of every strategy that the cluster and the grid allow."""
    share = take_share(model, training)
    return [
        forecast_one(strategy, model, share, cluster, training)
        for strategy in STRATEGIES
        if _is_possible(strategy, cluster, training)
    ]


def _is_possible(strategy: Strategy, cluster: Cluster, training: Training) -> bool:
    if strategy.within_node:
        cut = training.tp * training.pp
        return cluster.nodes > 1 and cluster.gpus % cut == 0 and cluster.gpus > cut
    return training.pp == 1 or strategy.stage < 2 or strategy.framework == "torch"


def forecast_one(
    strategy: Strategy, model: ModelSizes, share: RankShare, cluster: Cluster, training: Training
) -> StrategyForecast:
    """Return the forecast of one strategy."""
    ranks = count_data_ranks(cluster, training)
    shards = ranks // cluster.nodes if strategy.within_node else ranks
    states = _count_states(strategy, share, training, shards)
    gathered, buckets = _count_buffers(strategy, share, training, shards)
    autocast = strategy.stage == 0 and strategy.framework == "torch"
    # 16-bit logits; log-softmax, its gradient and that of its input in float32. The stage that
    # computes them can need more than the one with more parameters.
    logits = training.tokens * (training.itemsize + 12) * -(-model.vocab // training.tp)
    row = StrategyForecast(
        strategy=strategy,
        **states,
        gathered=gathered,
        buckets=buckets,
        activations=share.saved_bytes + autocast * share.autocast_bytes,
        recomputed=share.recomputed_bytes + autocast * share.recomputed_autocast_bytes,
        logits=logits,
        step=_count_step(strategy, share, training, shards),
        margin=round(MARGIN * cluster.gpu_bytes),
        host=0,
        disk=_count_disk(strategy, model, share, training),
        sent=_count_sent(strategy, share, training, shards, cluster),
    )
    return _offload(row, cluster, training, share, shards)


def _divide(share: RankShare, training: Training, ranks: int, *, trained: bool) -> int:
    """Return the elements of a shard; routed experts have fewer replicas to divide among."""
    dense = share.trained if trained else share.trained + share.frozen
    expert = share.expert_trained if trained else share.expert_trained + share.expert_frozen
    return -(-dense // ranks) - (-expert // max(ranks // training.ep, 1))


def _count_states(
    strategy: Strategy, share: RankShare, training: Training, shards: int
) -> dict[str, int]:
    size, stage = training.itemsize, strategy.stage
    gradient = training.gradient_bytes or size
    master = 4  # DeepSpeed partitions a copy of float32 parameters, too
    if strategy.framework == "torch":  # float32 parameters are their own masters
        size, gradient, master = 4, 4, 0
    trained = _divide(share, training, shards, trained=True)
    whole = _divide(share, training, shards, trained=False)
    of_optimizer = trained if stage >= 1 else share.trainable
    return {
        "parameters": size * (whole if stage >= 3 else share.numel),
        "gradients": gradient * (trained if stage >= 2 else share.trainable),
        "masters": master * of_optimizer,
        "moments": STATE_BYTES[training.optimizer] * of_optimizer,
    }


def _count_buffers(
    strategy: Strategy, share: RankShare, training: Training, shards: int
) -> tuple[int, int]:
    size = training.itemsize
    if strategy.stage == 3 and strategy.framework == "torch":
        # The root stays gathered in the forward pass; the next block is gathered ahead. In the
        # backward pass a block's gradients are reduced from a float32 copy.
        gathered = size * (share.outside + 2 * share.largest_block)
        is_trained = share.trainable > 0
        return gathered, (size + 4) * share.largest_block if is_trained else 0
    if strategy.stage == 3:
        gathered = max(LIVE_ELEMENTS, share.largest_block)
        return size * min(share.numel, gathered), size * BUCKET_ELEMENTS
    if strategy.stage == 0:
        # Autocast keeps 16-bit weights; DDP's buckets are as large as the gradients.
        return size * share.numel if size == 2 else 0, 4 * share.trainable * (shards > 1)
    # With overlap_comm there are two buckets, as large as the setting; parameters are gathered in
    # place.
    return 0, 2 * size * BUCKET_ELEMENTS


def _count_step(strategy: Strategy, share: RankShare, training: Training, shards: int) -> int:
    """Return the bytes of the float32 copies that a DeepSpeed step makes of 16-bit gradients."""
    if strategy.framework == "torch" or strategy.offload_optimizer or training.itemsize == 4:
        return 0
    partition = _divide(share, training, shards, trained=True)
    return 4 * (min(partition, LIVE_ELEMENTS) if strategy.stage == 3 else partition)


def _offload(
    row: StrategyForecast, cluster: Cluster, training: Training, share: RankShare, shards: int
) -> StrategyForecast:
    strategy, host = row.strategy, 0
    if strategy.offload_optimizer:
        partition = _divide(share, training, shards, trained=True)
        host += row.masters + row.moments + 4 * partition  # gradients wait in float32
        # Stage 3 keeps the 16-bit gradients beside them, stage 2 the updated 16-bit parameters.
        host += row.gradients if strategy.stage == 3 else training.itemsize * partition
        row = replace(row, masters=0, moments=0, gradients=0)
    if strategy.offload_param:
        host += row.parameters
        row = replace(row, parameters=0)
    return replace(row, host=host * cluster.gpus)


def _count_disk(strategy: Strategy, model: ModelSizes, share: RankShare, training: Training) -> int:
    total = sum(tensor.numel for _, tensor in model.named_tensors())
    trained = total if not training.lora_rank else share.trained
    if share.frozen and not training.lora_rank:
        trained = round(total * share.trainable / share.numel)
    total += trained if training.lora_rank else 0
    state = STATE_BYTES[training.optimizer]
    if strategy.framework == "torch":
        return 4 * total + state * trained
    return training.itemsize * total + (4 + state) * trained


def _count_sent(
    strategy: Strategy, share: RankShare, training: Training, shards: int, cluster: Cluster
) -> int:
    # A ring of N ranks sends (N - 1) / N of what is gathered or scattered (ZeRO, section 7).
    times = count_accumulation(cluster, training)
    size, ranks = training.itemsize, count_data_ranks(cluster, training)
    gradient = 4 if strategy.framework == "torch" else training.gradient_bytes or size
    if strategy.stage == 0:
        moved = 2 * gradient * share.trainable
    elif strategy.stage == 1:
        moved = (gradient + size) * share.trainable
    elif strategy.stage == 2:
        moved = (times * gradient + size) * share.trainable
    else:
        moved = times * (2 * size * share.numel + gradient * share.trainable)
    sent = moved * (shards - 1) // shards
    if shards < ranks:  # replicas sum their shards of the gradients
        replicas = ranks // shards
        sent += 2 * gradient * share.trainable // shards * (replicas - 1) // replicas
    return sent


def fit_micro_batch(
    strategy: Strategy,
    model: ModelSizes,
    cluster: Cluster,
    training: Training,
    *,
    checkpointing: bool,
) -> int:
    """Return the largest micro batch, a power of two, that fits; 0 if one sample does not."""
    best = 0
    for micro in _list_micro_batches(cluster, training):
        chosen = replace(training, micro_batch=micro)
        row = forecast_one(strategy, model, take_share(model, chosen), cluster, chosen)
        if not row.fits(cluster, checkpointing=checkpointing):
            break
        best = micro
    return best


def _list_micro_batches(cluster: Cluster, training: Training) -> Iterator[int]:
    ranks = count_data_ranks(cluster, training)
    for micro in (1 << n for n in range(11)):
        if training.global_batch and training.global_batch % (ranks * micro):
            return
        yield micro
