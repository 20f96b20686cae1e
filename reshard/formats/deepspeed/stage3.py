"""Read ZeRO stage 3: every parameter in ``ceil(numel / ranks)`` elements on each rank.

Geometry (DeepSpeed 0.19.8 ``stage3.py``, ``partition_parameters.py``): a sub-group's flat tensor
holds this rank's pieces one after the other, in the order of ``param_shapes[sub_group]``; the
last ranks' pieces are padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from reshard.containers.torch_objects import Tensor
from reshard.core.box import Index
from reshard.core.manifest import MASTER, PARAM, Entry
from reshard.errors import MIXED, CorruptError
from reshard.formats.deepspeed.stage12 import divide_members, read_scalars
from reshard.formats.deepspeed.states import (
    ModelStates,
    OptimizerStates,
    Shapes,
    is_of_another_length,
    require_equal,
    require_raw,
    select_flat_slots,
)
from reshard.layouts.runs import EqualRuns, RankOffsets


def read(shapes: Shapes, owners: Sequence[Sequence[Sequence[OptimizerStates]]]) -> Iterator[Entry]:
    """Yield the master weights and every optimizer slot of every sub-group.

    Args:
        owners: for each sub-group, the ranks that share each of its parts; see
            `stage12.read_groups`.

    Raises:
        CorruptError: a sub-group is not as long as its parameters.
    """
    for index, (members, parts) in enumerate(zip(shapes, owners, strict=True)):
        for inside, ranks in divide_members(members, parts):
            yield from _read_part(index, inside, ranks, len(shapes))


def _read_part(
    index: int,
    members: Mapping[str, Index],
    ranks: Sequence[OptimizerStates],
    sub_groups: int,
) -> Iterator[Entry]:
    masters = [_get_masters(rank, sub_groups)[index] for rank in ranks]
    states = [rank.get_group_state(index) for rank in ranks]
    slots = [select_flat_slots(state) for state in states]
    kinds = require_equal(
        f"the list of optimizer slots of sub-group {index}",
        {rank.file.path: sorted(own) for rank, own in zip(ranks, slots, strict=True)},
    )
    expected = [count_piece_elements(members, len(ranks))] * len(ranks)
    for kind in (MASTER, *kinds):
        tensors = masters if kind == MASTER else [own[kind] for own in slots]
        if kind != MASTER and is_of_another_length(kind, tensors, expected):
            continue
        pieces = zip(ranks, tensors, strict=True)
        yield from _split(kind, members, [require_raw(rank.file, t) for rank, t in pieces])
    yield from read_scalars(members, list(zip(ranks, states, strict=True)))


def _get_masters(rank: OptimizerStates, sub_groups: int) -> list[Tensor]:
    groups = rank.require_list("fp32_flat_groups")
    if len(groups) != sub_groups:
        raise CorruptError(
            rank.file.path,
            f"contains {len(groups)} sub-groups, but param_shapes lists {sub_groups}",
            MIXED,
        )
    return groups


def count_piece_elements(members: Mapping[str, Index], ranks: int) -> int:
    """Return how many elements of a sub-group one rank holds, padding included."""
    return sum(-(-prod(shape) // ranks) for shape in members.values())


def _split(kind: str, members: Mapping[str, Index], pieces: Sequence[Tensor]) -> Iterator[Entry]:
    ranks = len(pieces)
    expected = count_piece_elements(members, ranks)
    for number, piece in enumerate(pieces):
        if piece.numel != expected:
            raise CorruptError(
                piece.storage.file,
                f"rank {number} stores {piece.numel} elements of {kind} in a sub-group whose"
                f" {len(members)} parameters take {expected} elements on each of {ranks} ranks",
                MIXED,
            )
    dtype = require_equal(f"the dtype of {kind}", {p.storage.file: p.dtype for p in pieces})
    files, offsets = tuple(p.storage.file for p in pieces), tuple(p.byte_offset for p in pieces)
    locations, at = RankOffsets(files, offsets), 0  # bytes before the member in each piece
    for fqn, shape in members.items():
        yield Entry(fqn, kind, dtype, shape, EqualRuns(locations, dtype, shape, at))
        at += count_piece_elements({fqn: shape}, ranks) * dtype.itemsize


def is_quantised(model: ModelStates, fqn: str) -> bool:
    """Return whether the fragments of a frozen parameter are integers, which have no scales.

    DeepSpeed with ``zero_quantized_nontrainable_weights`` (0.19.8 ``partition_parameters.py``,
    ``ds_quant_scale``) saves the codes alone (``engine.py``, ``_get_param_fragment_func``).
    """
    fragment, placeholder = (
        model.get_section("frozen_param_fragments").get(fqn),
        model.find_tensor(fqn),
    )
    return (
        isinstance(fragment, Tensor)
        and placeholder is not None
        and placeholder.dtype.family == "float"
        and fragment.dtype.family != "float"
    )


def read_frozen(models: Sequence[ModelStates]) -> Iterator[Entry]:
    """Yield the frozen parameters: the ranks' fragments one after the other, cut to numel."""
    for fqn, shape in models[0].get_section("frozen_param_shapes").items():
        fragments = [model.get_section("frozen_param_fragments").get(fqn) for model in models]
        pieces = [
            require_raw(model.file, fragment)
            for model, fragment in zip(models, fragments, strict=True)
            if isinstance(fragment, Tensor)
        ]
        if len(pieces) < len(models) or is_quantised(models[0], fqn):
            continue  # the checkpoint does not have its values
        if prod(shape):
            yield from _split(PARAM, {fqn: tuple(shape)}, pieces)
        else:
            yield Entry(fqn, PARAM, pieces[0].dtype, tuple(shape), ())
