"""ZeRO stage 3: every parameter in ``ceil(numel / ranks)`` elements a rank.

Geometry (DeepSpeed 0.19.8 ``stage3.py``, ``partition_parameters.py``): a sub-group's flat tensor
holds this rank's pieces one after the other, in the order of ``param_shapes[sub_group]``; the
last ranks' pieces are padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard.box import Index
from reshard.containers.torch_objects import Tensor
from reshard.errors import CorruptError
from reshard.formats.deepspeed.flat import scalars, slots_of
from reshard.formats.deepspeed.states import (
    MIXED,
    ModelStates,
    OptimizerStates,
    Piece,
    Shapes,
    agree,
    piece_of,
)
from reshard.layout.runs import EqualRuns, RankOffsets
from reshard.manifest import MASTER, PARAM, Entry

Swapped = Mapping[tuple[int, int, str], Piece]  # (rank, sub-group, kind) -> its place


def read(shapes: Shapes, ranks: Sequence[OptimizerStates], swapped: Swapped) -> Iterator[Entry]:
    """Master weights and every optimizer slot of every sub-group.

    Args:
        swapped: the pieces that lie in swap files instead of the optimizer states.

    Raises:
        CorruptError: sub-groups whose length is not that of their shapes.
    """
    flats = [_flat_groups(rank, len(shapes)) for rank in ranks]
    for index, members in enumerate(shapes):
        yield from _split(MASTER, members, _pieces(MASTER, index, ranks, flats, swapped))
        slots = [slots_of(sub_group_state(rank, index)) for rank in ranks]
        names = agree(
            f"the list of optimizer slots of sub-group {index}",
            {rank.file.path: sorted(held) for rank, held in zip(ranks, slots, strict=True)},
            MIXED,
        )
        for name in names:
            held = [{index: slot[name]} for slot in slots]
            yield from _split(name, members, _pieces(name, index, ranks, held, swapped))
        yield from scalars(members, [(rank, sub_group_state(rank, index)) for rank in ranks])


def _pieces(
    kind: str,
    index: int,
    ranks: Sequence[OptimizerStates],
    held: Sequence[Mapping[int, Tensor]],
    swapped: Swapped,
) -> list[Piece]:
    """Every rank's piece of one sub-group, from its file or its swap file."""
    return [
        swapped.get((rank.rank, index, kind)) or piece_of(rank.file, tensors[index])
        for rank, tensors in zip(ranks, held, strict=True)
    ]


def sub_group_state(rank: OptimizerStates, index: int) -> dict[str, Any]:
    """The optimizer's state of one sub-group."""
    optimizer = rank.root.get("optimizer_state_dict") or {}
    found: dict[str, Any] = optimizer.get("state", {}).get(index) or {}
    return found


def _flat_groups(rank: OptimizerStates, count: int) -> dict[int, Tensor]:
    groups = rank.listed("fp32_flat_groups")
    if len(groups) != count:
        raise CorruptError(
            rank.file.path, f"holds {len(groups)} sub-groups, param_shapes lists {count}", MIXED
        )
    return dict(enumerate(groups))


def piece_numel(members: Mapping[str, Index], ranks: int) -> int:
    """Elements of a sub-group that one rank holds, padding included."""
    return sum(-(-prod(shape) // ranks) for shape in members.values())


def _split(kind: str, members: Mapping[str, Index], held: Sequence[Piece]) -> Iterator[Entry]:
    """Entries of one sub-group from the ranks' flat tensors."""
    ranks = len(held)
    expected = piece_numel(members, ranks)
    for number, piece in enumerate(held):
        if piece.numel != expected:
            raise CorruptError(
                piece.file,
                f"rank {number} holds {piece.numel} elements of {kind} in a sub-group whose"
                f" {len(members)} parameters take {expected} a rank at {ranks} ranks",
                MIXED,
            )
    dtype = agree(f"the dtype of {kind}", {p.file: p.dtype for p in held}, MIXED)
    files, offsets = tuple(p.file for p in held), tuple(p.byte_offset for p in held)
    places, skipped = RankOffsets(files, offsets), 0
    for fqn, shape in members.items():
        yield Entry(fqn, kind, dtype, shape, EqualRuns(places, dtype, shape, skipped))
        skipped += piece_numel({fqn: shape}, ranks) * dtype.itemsize


def frozen(models: Sequence[ModelStates]) -> Iterator[Entry]:
    """Frozen parameters: the ranks' fragments one after the other, cut to numel.

    Raises:
        CorruptError: the fragments are not the parameter.
    """
    shapes: dict[str, Index] = models[0].mapping("frozen_param_shapes")
    for fqn, shape in shapes.items():
        fragments = [_fragment(model, fqn) for model in models]
        held = [fragment for fragment in fragments if fragment is not None]
        if len(held) < len(fragments):
            continue  # saved with exclude_frozen_parameters: nothing of it is in the checkpoint
        if prod(shape):
            yield from _split(PARAM, {fqn: tuple(shape)}, held)
        else:
            yield Entry(fqn, PARAM, held[0].dtype, tuple(shape), ())


def _fragment(model: ModelStates, fqn: str) -> Piece | None:
    found = model.mapping("frozen_param_fragments").get(fqn)
    return piece_of(model.file, found) if isinstance(found, Tensor) else None
