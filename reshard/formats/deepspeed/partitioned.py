"""ZeRO stage 3: every parameter in ``ceil(numel / ranks)`` elements a rank.

Geometry (DeepSpeed 0.19.8 ``stage3.py``, ``partition_parameters.py``): a sub-group's flat tensor
holds this rank's pieces one after the other, in the order of ``param_shapes[sub_group]``; the
last ranks' pieces are padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from reshard.box import Index
from reshard.errors import CorruptError
from reshard.formats.deepspeed.flat import slots_of
from reshard.formats.deepspeed.states import (
    MIXED,
    ModelStates,
    OptimizerStates,
    Shapes,
    agree,
)
from reshard.formats.torch_file import Tensor, TorchFile
from reshard.layout import equal_piece, run_chunks
from reshard.manifest import MASTER, PARAM, Chunk, Entry

Held = tuple[TorchFile, Tensor]


def read(shapes: Shapes, ranks: Sequence[OptimizerStates]) -> Iterator[Entry]:
    """Master weights and every optimizer slot of every sub-group.

    Raises:
        CorruptError: sub-groups whose length is not that of their shapes.
    """
    flats = [_flat_groups(rank, len(shapes)) for rank in ranks]
    for index, members in enumerate(shapes):
        yield from _split(MASTER, members, [flat[index] for flat in flats])
        slots = [slots_of(sub_group_state(rank, index)) for rank in ranks]
        names = agree(
            f"the list of optimizer slots of sub-group {index}",
            {rank.file.path: sorted(held) for rank, held in zip(ranks, slots, strict=True)},
            MIXED,
        )
        for name in names:
            held = [(rank.file, slot[name]) for rank, slot in zip(ranks, slots, strict=True)]
            yield from _split(name, members, held)


def sub_group_state(rank: OptimizerStates, index: int) -> dict[str, Any]:
    """The optimizer's state of one sub-group."""
    optimizer = rank.root.get("optimizer_state_dict") or {}
    state = optimizer.get("state", {}).get(index)
    return state if isinstance(state, dict) else {}


def _flat_groups(rank: OptimizerStates, count: int) -> list[Held]:
    groups = rank.root["fp32_flat_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, Tensor) for group in groups):
        raise CorruptError(rank.file.path, "fp32_flat_groups is not a list of tensors", MIXED)
    if len(groups) != count:
        raise CorruptError(
            rank.file.path, f"holds {len(groups)} sub-groups, param_shapes lists {count}", MIXED
        )
    return [(rank.file, group) for group in groups]


def _split(kind: str, members: dict[str, Index], held: Sequence[Held]) -> Iterator[Entry]:
    """Entries of one sub-group from the ranks' flat tensors."""
    ranks = len(held)
    steps = {fqn: -(-prod(shape) // ranks) for fqn, shape in members.items()}
    expected = sum(steps.values())
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for number, (file, flat) in enumerate(held):
        if flat.numel != expected:
            raise CorruptError(
                file.path,
                f"rank {number} holds {flat.numel} elements of {kind} in a sub-group whose"
                f" {len(members)} parameters take {expected} a rank at {ranks} ranks",
                MIXED,
            )
        offset = file.chunk(flat).byte_offset
        for fqn, shape in members.items():
            start, stop = equal_piece(prod(shape), ranks, number)
            chunks[fqn] += run_chunks(file.path, offset, flat.dtype, shape, start, stop)
            offset += steps[fqn] * flat.dtype.itemsize
    for fqn, shape in members.items():
        yield Entry(fqn, kind, held[0][1].dtype, shape, tuple(chunks[fqn]))


def frozen(models: Sequence[ModelStates]) -> Iterator[Entry]:
    """Frozen parameters: the ranks' fragments one after the other, cut to numel."""
    shapes: dict[str, Index] = models[0].mapping("frozen_param_shapes")
    for fqn, shape in shapes.items():
        fragments = [_fragment(model, fqn) for model in models]
        if any(file is None for file in fragments):
            continue  # saved with exclude_frozen_parameters: nothing of it is in the checkpoint
        held = [fragment for fragment in fragments if fragment is not None]
        if prod(shape):
            yield from _split(PARAM, {fqn: tuple(shape)}, held)
        else:
            yield Entry(fqn, PARAM, held[0][1].dtype, tuple(shape), ())


def _fragment(model: ModelStates, fqn: str) -> Held | None:
    found = model.mapping("frozen_param_fragments").get(fqn)
    return (model.file, found) if isinstance(found, Tensor) else None
