"""The part of a model that one rank holds, after tensor, pipeline and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from reshard.errors import UsageError
from reshard.sizing.model import BlockSizes, ModelSizes, Parameter
from reshard.sizing.setup import Training

_AUTOCAST_BYTES = 14
"""Bytes per token, block and element of the residual stream; see `_count_autocast`."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Numbers of elements on the rank that holds most, before any sharding over data ranks.

    Args:
        trained, frozen: parameters outside of routed experts.
        expert_trained, expert_frozen: parameters of routed experts.
        largest_block: parameters of the largest block, with its experts.
        outside: parameters outside of the blocks.
        saved_bytes: bytes that the forward pass of one micro batch saves.
        recomputed_bytes: what it saves if every block is recomputed in the backward pass.
        autocast_bytes: what it saves beside that under autocast of float32 parameters.
        recomputed_autocast_bytes: the same if every block is recomputed.
    """

    trained: int
    frozen: int
    expert_trained: int
    expert_frozen: int
    largest_block: int
    outside: int
    saved_bytes: int
    recomputed_bytes: int
    autocast_bytes: int = 0
    recomputed_autocast_bytes: int = 0

    @property
    def numel(self) -> int:
        """All parameters."""
        return self.trained + self.frozen + self.expert_trained + self.expert_frozen

    @property
    def trainable(self) -> int:
        """The trained parameters."""
        return self.trained + self.expert_trained


def take_share(model: ModelSizes, training: Training) -> RankShare:
    """Return the part of the model on the rank that holds most of it.

    Raises:
        UsageError: the model has fewer blocks than stages, or nothing would be trained.
    """
    stages = _list_stages(model, training)
    shares = [_count_stage(model, training, stage) for stage in stages]
    if not any(share.trainable for share in shares):
        raise _explain_untrained(model, training)
    share = max(shares, key=lambda share: share.numel)
    if training.pp > 1:  # a first stage keeps the activations of as many micro batches as stages
        return replace(
            share,
            saved_bytes=training.pp * max(share.saved_bytes for share in shares),
            recomputed_bytes=training.pp * max(share.recomputed_bytes for share in shares),
            autocast_bytes=training.pp * max(share.autocast_bytes for share in shares),
            recomputed_autocast_bytes=training.pp
            * max(share.recomputed_autocast_bytes for share in shares),
        )
    return share


def _explain_untrained(model: ModelSizes, training: Training) -> UsageError:
    if training.lora_targets:
        return UsageError(
            f"--lora-targets {', '.join(training.lora_targets)}",
            "names no matrix of the model that can have an adapter",
            "name modules of the layers, e.g. q_proj, or leave it out",
        )
    if training.lora_rank:
        return UsageError(
            f"--lora-rank {training.lora_rank}", "the model has no matrix that can have an adapter"
        )
    if training.freeze:
        return UsageError(f"--freeze {training.freeze}", "matches every parameter that is trained")
    return UsageError(model.source, "all parameters are frozen, so there is nothing to train")


@dataclass(frozen=True, slots=True)
class _PipelineStage:
    blocks: Sequence[BlockSizes]
    is_first: bool
    is_last: bool


def _list_stages(model: ModelSizes, training: Training) -> list[_PipelineStage]:
    count, stages = len(model.blocks), training.pp
    if stages > max(count, 1):
        raise UsageError(
            f"--pp {stages}", f"the model has {count} blocks", f"use --pp {count} or less"
        )
    bounds = [round(count * n / stages) for n in range(stages + 1)]
    return [
        _PipelineStage(model.blocks[start:stop], start == 0, stop == count)
        for start, stop in pairwise(bounds)
    ]


def _count_stage(model: ModelSizes, training: Training, stage: _PipelineStage) -> RankShare:
    outer: list[tuple[str, Parameter]] = []
    if stage.is_first:
        outer += [(tensor.name, tensor) for tensor in model.before]
    if stage.is_last:
        outer += [(tensor.name, tensor) for tensor in model.after]
        outer += _list_tied(model, stage)
    inner = [named for block in stage.blocks for named in block.named_tensors()]
    counts = dict.fromkeys(((e, t) for e in (False, True) for t in (False, True)), 0)
    for name, tensor in [*outer, *inner]:
        is_trained = not _is_frozen(name, model, training)
        counts[tensor.is_expert, is_trained] += _count_elements(tensor, training)
    counts[False, True] += sum(_count_adapters(tensor, training) for _, tensor in inner)
    saved, recomputed = _count_saved(model, training, stage)
    return RankShare(
        counts[False, True],
        counts[False, False],
        counts[True, True],
        counts[True, False],
        max(
            (sum(_count_elements(t, training) for t in b.tensors) for b in stage.blocks), default=0
        ),
        sum(_count_elements(tensor, training) for _, tensor in outer),
        saved,
        recomputed,
        *_count_autocast(model, training, len(stage.blocks)),
    )


def _list_tied(model: ModelSizes, stage: _PipelineStage) -> list[tuple[str, Parameter]]:
    has_head = any(tensor.name.endswith("lm_head.weight") for tensor in model.after)
    if stage.is_first or has_head or not model.before:
        return []
    return [(model.before[0].name, model.before[0])]


def _is_frozen(name: str, model: ModelSizes, training: Training) -> bool:
    if training.lora_rank or name in model.frozen:
        return True
    return bool(training.freeze) and re.search(training.freeze, name) is not None


def _count_elements(tensor: Parameter, training: Training) -> int:
    cut = training.tp if tensor.is_cut else 1
    cut *= training.ep if tensor.is_expert else 1
    return -(-tensor.numel // cut)


def _count_adapters(tensor: Parameter, training: Training) -> int:
    if not training.lora_rank or len(tensor.shape) != 2 or tensor.is_expert or not tensor.is_cut:
        return 0
    module = tensor.name.removesuffix(".weight")
    targets = training.lora_targets
    if targets and not any(module == t or module.endswith(f".{t}") for t in targets):
        return 0
    return training.lora_rank * sum(tensor.shape)


def _count_autocast(model: ModelSizes, training: Training, blocks: int) -> tuple[int, int]:
    """Return the bytes that autocast adds to what is saved, without and with recomputation.

    The residual stream, the norms and the rotary embedding are float32. On an H100 with torch 2.11,
    Llama, Qwen 3, Gemma 2, OLMo 2 and GPT-2 saved 13 to 29 bytes more per token, block and element
    of the residual stream than with 16-bit parameters (`benchmarks/gpu_memory.py`).
    """
    if training.itemsize == 4:
        return 0, 0
    width = training.tokens * model.hidden
    more = training.itemsize  # the saved input of a recomputed block is float32
    return blocks * _AUTOCAST_BYTES * width, (blocks * more + _AUTOCAST_BYTES) * width


def _count_saved(model: ModelSizes, training: Training, stage: _PipelineStage) -> tuple[int, int]:
    """With recomputation a block saves its input only, and one block at a time saves everything."""
    size, tokens = training.itemsize, training.tokens
    every = [b.saved.count_bytes(size, training.seq_len, training.tp) for b in stage.blocks]
    outer = model.saved.count_bytes(size, training.seq_len, training.tp) if stage.is_last else 0
    inputs = len(stage.blocks) * size * model.hidden
    saved = tokens * (sum(every) + outer)
    recomputed = tokens * (inputs + max(every, default=0) + outer)
    return round(saved), round(min(saved, recomputed))
