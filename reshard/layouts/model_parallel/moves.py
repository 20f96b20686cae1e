"""Blocks of one tensor that are blocks of another: all of fusing, cutting and permuting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.core.box import Box, Index, intersect
from reshard.core.chunks import Chunk


@dataclass(frozen=True, slots=True)
class Move:
    """A block of the source that is a block of the target.

    Args:
        source: block of the source tensor; its rows (dim 0) are ``step`` apart, and its extent in
            dim 0 is their number.
        target: first element in the target tensor, where the rows are neighbours.
    """

    source: Box
    target: Index
    step: int = 1


def apply_moves(chunks: Iterable[Chunk], moves: Sequence[Move]) -> Iterator[Chunk]:
    """Yield the stored blocks of the source as blocks of the target.

    Elements that no move takes are left out.
    """
    for chunk in chunks:
        for move in moves:
            taken = _apply_move(chunk, move)
            if taken is not None:
                yield taken


def _apply_move(chunk: Chunk, move: Move) -> Chunk | None:
    origin, shape = list(move.target), []
    offset, strides = chunk.byte_offset, list(chunk.byte_strides)
    box = chunk.box
    for dim, (start, extent) in enumerate(zip(box.origin, box.shape, strict=True)):
        step = move.step if dim == 0 else 1
        first = move.source.origin[dim]
        # The rows of the move that the chunk has: from the first one inside to the last one inside.
        low = max(0, -(-(start - first) // step))
        high = min(move.source.shape[dim], (start + extent - 1 - first) // step + 1)
        if high <= low:
            return None
        origin[dim] += low
        shape.append(high - low)
        offset += (first + low * step - start) * strides[dim]
        strides[dim] *= step
    return replace(
        chunk,
        box=Box(tuple(origin), tuple(shape)),
        byte_offset=offset,
        byte_strides=tuple(strides),
    )


def align_copies(a: Sequence[Chunk], b: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Cut two copies of a tensor into the same boxes, because only equal boxes are replicas."""
    # Dicts, because a set has no order and the chunks of a manifest must always have the same one.
    boxes = dict.fromkeys(chunk.box for chunk in a if chunk.box.volume)
    others = dict.fromkeys(chunk.box for chunk in b if chunk.box.volume)
    if boxes.keys() == others.keys():
        return (*a, *b)
    both = [
        Move(box, box.origin) for x in boxes for y in others if (box := intersect(x, y)) is not None
    ]
    return (*apply_moves(a, both), *apply_moves(b, both))


def make_row_moves(
    shape: Index, runs: Iterable[tuple[int, int, int]], step: int = 1
) -> tuple[Move, ...]:
    """Return moves of whole rows: ``(source row, target row, count)`` each.

    Args:
        shape: shape of the source, with at least one dim.
    """
    tail = tuple(shape[1:])
    zeros = (0,) * len(tail)
    return tuple(
        Move(Box((source, *zeros), (count, *tail)), (target, *zeros), step)
        for source, target, count in runs
    )


def take_slice(chunks: Iterable[Chunk], index: int) -> Iterator[Chunk]:
    """Yield the blocks of one slice along dim 0, as blocks of a tensor without that dim."""
    for chunk in chunks:
        at = index - chunk.box.origin[0]
        if 0 <= at < chunk.box.shape[0]:
            yield replace(
                chunk,
                box=Box(chunk.box.origin[1:], chunk.box.shape[1:]),
                byte_offset=chunk.byte_offset + at * chunk.byte_strides[0],
                byte_strides=chunk.byte_strides[1:],
            )


def put_in_stack(chunks: Iterable[Chunk], index: int) -> Iterator[Chunk]:
    """Yield the blocks of a tensor as blocks of a stack along a new dim 0."""
    for chunk in chunks:
        yield replace(
            chunk,
            box=Box((index, *chunk.box.origin), (1, *chunk.box.shape)),
            byte_strides=(0, *chunk.byte_strides),  # the new dim has one index, so no stride
        )
