"""Restore the shape of tensors that Megatron-core 0.6 to 0.15 saved as flat ranges.

In that form, each rank of a distributed optimizer has a run of its part of a parameter
(``fully_sharded_model_space``). A tensor of shape ``(X, Y)`` in parts of ``(x, y)`` is stored as
one of shape ``(X / x, Y / y, x * y)``, whose last dim is cut anywhere; ``.metadata`` has the
first shape.

Source: Megatron-LM core_v0.15.3 ``core/dist_checkpointing/strategies/torch.py``
(``sharded_tensor_to_torch_sharded_tensor``, ``nd_reformulated_orig_global_shape``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from reshard.core.box import Box, Index
from reshard.core.chunks import Chunk
from reshard.errors import CorruptError
from reshard.layouts.partition import run_chunks
from reshard.state_dict.global_tensor import GlobalTensor


def restore(where: object, key: str, stored: GlobalTensor, shape: Index) -> GlobalTensor:
    """Return the tensor in the shape that the metadata give.

    Raises:
        CorruptError: the shape cannot be divided into such parts.
    """
    *parts, numel = stored.shape
    fits = len(parts) == len(shape) and all(
        count > 0 and extent % count == 0 for count, extent in zip(parts, shape, strict=False)
    )
    part = tuple(e // count for count, e in zip(parts, shape, strict=True)) if fits else ()
    if not fits or prod(part) != numel:
        raise CorruptError(
            where,
            f"states shape {shape} for {key!r}, which cannot be divided into parts {stored.shape}",
        )
    chunks = tuple(
        box for chunk in stored.chunks for box in _iterate_boxes(where, key, chunk, part)
    )
    return replace(stored, shape=shape, chunks=chunks)


def _iterate_boxes(where: object, key: str, chunk: Chunk, part: Index) -> Iterator[Chunk]:
    *numbers, start = chunk.box.origin
    *counts, length = chunk.box.shape
    if start + length > prod(part):
        raise CorruptError(
            where, f"places a range of {key!r} at {chunk.box}, which is outside its part"
        )
    row = replace(chunk, box=Box((start,), (length,)), byte_strides=chunk.byte_strides[-1:])
    for steps in product(*map(range, counts)):
        at = [(n + m) * extent for n, m, extent in zip(numbers, steps, part, strict=True)]
        strides = chunk.byte_strides[: len(steps)]
        offset = chunk.byte_offset + sum(n * by for n, by in zip(steps, strides, strict=True))
        stored = replace(row, byte_offset=offset)
        for box in run_chunks(stored, 0, part, start, start + length):
            yield replace(box, box=box.box.shift(at))
