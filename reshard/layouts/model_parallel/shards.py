"""The part of a parameter that one tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.core.box import Box, Index, whole
from reshard.core.chunks import Chunk
from reshard.core.manifest import WEIGHT_KINDS, Entry
from reshard.errors import CorruptError, UsageError
from reshard.layouts.model_parallel.moves import Move, align_copies, apply_moves


@dataclass(frozen=True, slots=True)
class Split:
    """The cut of a parameter over tensor-parallel ranks.

    Args:
        dim: the dim that is cut; None: every rank holds the whole.
        parts: the relative extents of the tensors that are fused along it. Each is cut separately,
            so that a rank holds a piece of every one (gate and up: ``(1, 1)``).
        padded: whether dim 0 is a vocabulary, whose last rows may be padding.
        widths: the extent of each part on each rank, if a checkpoint states it; they may differ.
        summed: whether every rank holds the same share of the values, whose sum is the parameter.
        rows: the extent of the whole along ``dim``, if the parts are known in rows.
    """

    dim: int | None = None
    parts: tuple[int, ...] = (1,)
    padded: bool = False
    widths: tuple[Index, ...] = ()
    summed: bool = False
    rows: int | None = None


REPLICATED = Split()


def gather(pieces: Sequence[Entry], split: Split) -> Entry:
    """Join the pieces of every rank, given in rank order, to the whole tensor.

    Replicas are kept, each as a chunk, so that they can be compared.

    Raises:
        CorruptError: the pieces do not fit together.
    """
    first = pieces[0]
    for piece in pieces[1:]:
        same_dims = split.dim is None or len(piece.shape) == len(first.shape) > split.dim
        same_extents = _drop_dim(piece.shape, split.dim) == _drop_dim(first.shape, split.dim)
        if not (same_dims and same_extents) or piece.dtype != first.dtype:
            raise CorruptError(
                piece.where,
                f"{piece.fqn!r} ({piece.kind}) is {piece.dtype.name} {piece.shape} there, but"
                f" {first.dtype.name} {first.shape} on the first tensor-parallel rank",
                "the files belong to different runs, or a rule states the wrong cut: see --rules",
            )
    if split.dim is None or len(pieces) == 1:
        copies: Sequence[Chunk] = first.chunks
        for piece in pieces[1:]:
            copies = align_copies(copies, piece.chunks)
        return scale_shares(replace(first, chunks=tuple(copies)), split, len(pieces))
    extents = [piece.shape[split.dim] for piece in pieces]
    _check_rows(first.fqn, split, sum(extents))
    shape = _set_extent(first.shape, split.dim, sum(extents))
    chunks: list[Chunk] = []
    for rank, piece in enumerate(pieces):
        chunks += apply_moves(
            piece.chunks,
            [
                Move(local, block.origin)
                for block, local in _cut_blocks(first.fqn, shape, split, extents, rank)
            ],
        )
    return replace(first, shape=shape, chunks=tuple(chunks))


def scale_shares(entry: Entry, split: Split, ranks: int) -> Entry:
    """Return an entry whose chunks are scaled from one rank's share to the ranks' sum."""
    # Gradients of a sum are those of each summand: the optimizer's moments are the same.
    if ranks == 1 or not split.summed or entry.kind not in WEIGHT_KINDS:
        return entry
    return replace(entry, chunks=tuple(replace(c, factor=c.factor * ranks) for c in entry.chunks))


def list_blocks(
    fqn: str, shape: Index, split: Split, ranks: int, rank: int
) -> tuple[Index, tuple[tuple[Box, Box], ...]]:
    """Return the shape of a rank's piece, and its (block of the whole, block of the piece).

    Raises:
        UsageError: the tensor does not divide evenly, which the frameworks require.
        CorruptError: the ranks' widths are not those of its fused parts.
    """
    if split.dim is None:
        return tuple(shape), ((whole(shape), whole(shape)),)
    extent = shape[split.dim]
    if split.widths and sum(map(sum, split.widths)) == extent:
        extents = [sum(widths) for widths in zip(*split.widths, strict=True)]
        local = _set_extent(shape, split.dim, extents[rank])
        return local, tuple(_cut_blocks(fqn, tuple(shape), split, extents, rank))
    _check_rows(fqn, split, extent)
    if any(weight * extent % (ranks * sum(split.parts)) for weight in split.parts):
        raise UsageError(
            f"tensor-parallel size {ranks}",
            f"does not divide dim {split.dim} of {fqn!r}, which is {extent}"
            + (f" of {len(split.parts)} parts" if len(split.parts) > 1 else ""),
        )
    local = _set_extent(shape, split.dim, extent // ranks)
    return local, tuple(_cut_blocks(fqn, tuple(shape), split, [extent // ranks] * ranks, rank))


def _check_rows(fqn: str, split: Split, extent: int) -> None:
    if split.rows is not None and split.rows != extent:
        raise CorruptError(
            fqn,
            f"has {extent} rows along dim {split.dim}, and its parts have {split.rows} by the"
            " arguments of the run",
        )


def _cut_blocks(
    fqn: str, shape: Index, split: Split, extents: Sequence[int], rank: int
) -> list[tuple[Box, Box]]:
    # The whole tensor has each part in one piece, rank after rank; a rank's piece has its shares of
    # all parts one after the other.
    dim, zeros = split.dim or 0, (0,) * len(shape)
    blocks, start, local = [], 0, 0
    for widths in _get_widths(fqn, split, extents):
        piece = _set_extent(shape, dim, widths[rank])
        at = start + sum(widths[:rank])
        blocks.append(
            (Box(_set_extent(zeros, dim, at), piece), Box(_set_extent(zeros, dim, local), piece))
        )
        start += sum(widths)
        local += widths[rank]
    return blocks


def _get_widths(fqn: str, split: Split, extents: Sequence[int]) -> list[Sequence[int]]:
    total = sum(split.parts)
    if len(extents) == len(split.widths[0] if split.widths else ()):
        if [sum(widths) for widths in zip(*split.widths, strict=True)] == list(extents):
            return list(split.widths)
    elif not any(weight * extent % total for extent in extents for weight in split.parts):
        return [[weight * extent // total for extent in extents] for weight in split.parts]
    raise CorruptError(
        fqn,
        f"the ranks' pieces have the extents {list(extents)}, which do not match the fused parts",
    )


def _set_extent(shape: Index, dim: int, extent: int) -> Index:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _drop_dim(shape: Index, dim: int | None) -> Index:
    return tuple(shape) if dim is None else (*shape[:dim], *shape[dim + 1 :])
