"""Partition rules that several formats share: which elements of a tensor a rank stores."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from reshard.core.box import Box, Index, flat_span, row_major, run_boxes
from reshard.core.chunks import Chunk
from reshard.errors import UnsupportedError


def run_chunks(piece: Chunk, offset: int, shape: Index, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks of the run ``[start, stop)`` of a tensor that a flat tensor contains.

    Args:
        piece: the part of the flat tensor that one file stores.
        offset: the element of ``piece`` at which the run begins.

    Raises:
        UnsupportedError: the file stores the elements of ``piece`` with gaps.
    """
    file, dtype = require_dense(piece).file, piece.dtype
    strides = row_major(shape, dtype.itemsize)
    for box in run_boxes(shape, start, stop):
        at = offset + flat_span(box, shape)[0] - start
        yield Chunk(box, file, piece.byte_offset + at * dtype.itemsize, strides, dtype)


def compute_equal_piece(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return one rank's run of a tensor that is cut into ``ceil(numel / ranks)`` elements each.

    The last ranks own less, or nothing.

    >>> [compute_equal_piece(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-numel // ranks)
    return min(rank * step, numel), min((rank + 1) * step, numel)


class Member(NamedTuple):
    """The position of a tensor in a flat tensor, in elements."""

    fqn: str
    shape: Index
    start: int

    @property
    def stop(self) -> int:
        """The flat element after the tensor's last one."""
        return self.start + prod(self.shape)


def require_dense(piece: Chunk) -> Chunk:
    """Return a piece of a flat tensor, whose elements follow one another in the file.

    Raises:
        UnsupportedError: the file stores them with gaps.
    """
    if not piece.is_dense:
        raise UnsupportedError(
            piece.file,
            "stores a flat tensor with gaps between its elements, which reshard does not read",
            "store a contiguous copy of it",
        )
    return piece


def build_flat_chunks(
    members: Sequence[Member], pieces: Iterable[tuple[int, Chunk]]
) -> dict[str, list[Chunk]]:
    """Return the chunks of every member of a flat tensor that is stored in pieces.

    Args:
        members: in flat order, without overlap; the elements between them are padding.
        pieces: pairs of the flat element at which a piece begins, and the piece, 1-d and
            contiguous.
    """
    chunks: dict[str, list[Chunk]] = {member.fqn: [] for member in members}
    reaches = list(accumulate((member.stop for member in members), max))
    for low, piece in pieces:
        high = low + piece.box.volume
        for member in members[bisect_right(reaches, low) :]:
            if member.start >= high:
                break
            start, stop = max(member.start, low), min(member.stop, high)
            first, last = start - member.start, stop - member.start
            chunks[member.fqn] += run_chunks(piece, start - low, member.shape, first, last)
    return chunks


class Cut(NamedTuple):
    """A tensor dim that a mesh axis cuts into pieces of ``ceil(extent / size)``.

    ``split_factor`` above 1: later axes with that many ranks in total cut the dim before this axis
    does (torch's ``_StridedShard``).
    """

    dim: int
    split_factor: int = 1


def compute_mesh_box(
    shape: Sequence[int],
    cuts: Sequence[Cut | None],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    order: dict[int, Sequence[int]] | None = None,
) -> Box | None:
    """Return the block of a tensor that one rank of a device mesh stores.

    Args:
        cuts: one per mesh axis; None if the axis replicates.
        sizes: sizes of the mesh axes.
        coordinate: position of the rank on every axis.
        order: tensor dim -> mesh axes in the order in which they cut it, if that is not left to
            right.

    Returns:
        None if no order of the axes has the given split factors.
    """
    origin, extent = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        axes = (order or {}).get(dim) or _find_cutting_order(dim, cuts, sizes)
        if axes is None:
            return None
        for axis in axes:
            start, stop = compute_equal_piece(extent[dim], sizes[axis], coordinate[axis])
            origin[dim] += start
            extent[dim] = stop - start
    return Box(tuple(origin), tuple(extent))


def compute_packed_boxes(
    shape: Sequence[int],
    cuts: Sequence[Cut | None],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[tuple[Box, Index]]:
    """Return a rank's blocks of a tensor that packs several of one size, each cut by the same axis.

    torch describes gate and up in one matrix by a ``_StridedShard`` whose split factor is the
    number of packed tensors.

    Returns:
        Pairs of a block of the tensor and its origin in what the rank stores; none if several axes
        cut a dim.
    """
    runs = [[(0, 0, extent)] for extent in shape]  # origin, origin in the rank's, extent
    dims = [cut.dim for cut in cuts if cut]
    if len(dims) != len(set(dims)):
        return []
    for cut, size, at in zip(cuts, sizes, coordinate, strict=True):
        if cut is None:
            continue
        runs[cut.dim], stored = [], 0
        for number in range(cut.split_factor):
            start, stop = compute_equal_piece(shape[cut.dim], cut.split_factor, number)
            low, high = compute_equal_piece(stop - start, size, at)
            runs[cut.dim].append((start + low, stored, high - low))
            stored += high - low
    blocks = []
    for chosen in product(*runs):
        origin, local, extent = zip(*chosen, strict=True)
        blocks.append((Box(origin, extent), local))
    return blocks


def _find_cutting_order(
    dim: int, cuts: Sequence[Cut | None], sizes: Sequence[int]
) -> list[int] | None:
    # An axis follows those later axes whose sizes multiply to its split factor (torch 2.13
    # ``distributed/tensor/_dtensor_spec.py``, ``_maybe_convert_StridedShard_to_shard_order``).
    order: list[int] = []
    for axis in reversed(range(len(cuts))):
        cut = cuts[axis]
        if cut is None or cut.dim != dim:
            continue
        products = list(accumulate((sizes[a] for a in order), lambda a, b: a * b, initial=1))
        if cut.split_factor not in products:
            return None
        order.insert(products.index(cut.split_factor), axis)
    return order
