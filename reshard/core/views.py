"""Views of a tensor: blocks, permutations and reshapes, applied to the chunks that store it.

No byte moves: a view changes which block of which tensor a stored block is. Every view has an
inverse, so a chain of views describes a conversion in both directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from reshard.core.box import Box, Index, intersect, row_major, run_boxes, whole
from reshard.core.chunks import Chunk


@dataclass(frozen=True, slots=True)
class Take:
    """The block ``box`` of a tensor of shape ``shape``, as a tensor of its own."""

    shape: Index
    box: Box

    def apply(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the parts of the chunks that are inside the block."""
        for chunk in chunks:
            inside = intersect(chunk.box, self.box)
            if inside is not None:
                steps = zip(inside.within(chunk.box).origin, chunk.byte_strides, strict=True)
                offset = chunk.byte_offset + sum(at * stride for at, stride in steps)
                yield replace(chunk, box=inside.within(self.box), byte_offset=offset)

    def invert(self) -> Put:
        """Return the view that puts the block back."""
        return Put(self.shape, self.box)


@dataclass(frozen=True, slots=True)
class Put:
    """A tensor as the block ``box`` of a larger tensor of shape ``shape``."""

    shape: Index
    box: Box

    def apply(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks as chunks of the larger tensor."""
        for chunk in chunks:
            yield replace(chunk, box=chunk.box.shift(self.box.origin))

    def invert(self) -> Take:
        """Return the view that takes the block out."""
        return Take(self.shape, self.box)


@dataclass(frozen=True, slots=True)
class Permute:
    """A tensor with its dims in another order: dim ``d`` of the result is ``dims[d]``."""

    dims: Index

    def apply(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks as chunks of the permuted tensor."""

        def pick(numbers: Index) -> Index:
            return tuple(numbers[dim] for dim in self.dims)

        for chunk in chunks:
            box = Box(pick(chunk.box.origin), pick(chunk.box.shape))
            yield replace(chunk, box=box, byte_strides=pick(chunk.byte_strides))

    def invert(self) -> Permute:
        """Return the permutation that restores the order."""
        return Permute(tuple(self.dims.index(dim) for dim in range(len(self.dims))))


@dataclass(frozen=True, slots=True)
class Reshape:
    """A tensor of shape ``before`` with its elements, in row-major order, in shape ``after``."""

    before: Index
    after: Index

    def apply(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks as chunks of the reshaped tensor, cut where a box needs it."""
        # `_group_dims` compares products of dims, which a dim of 0 makes equal too early.
        if not prod(self.before):
            return
        groups = _group_dims(self.before, self.after)
        for chunk in chunks:
            if not chunk.box.volume:
                continue  # more ranks than rows: DCP lists the empty blocks of the other ranks
            for dims in product(*_reshape_groups(chunk, self.before, self.after, groups)):
                offset = chunk.byte_offset
                origin: list[int] = []
                shape: list[int] = []
                strides: list[int] = []
                for part in dims:
                    offset += part.byte_offset
                    origin += part.box.origin
                    shape += part.box.shape
                    strides += part.byte_strides
                box = Box(tuple(origin), tuple(shape))
                yield replace(chunk, box=box, byte_offset=offset, byte_strides=tuple(strides))

    def invert(self) -> Reshape:
        """Return the reshape that restores the shape."""
        return Reshape(self.after, self.before)


View = Take | Put | Permute | Reshape


def apply_views(chunks: Iterable[Chunk], views: Iterable[View]) -> Iterator[Chunk]:
    """Return the chunks of a tensor as chunks of the last view; parts outside are left out."""
    for view in views:
        chunks = view.apply(chunks)
    return iter(chunks)


def invert_views(views: Sequence[View]) -> tuple[View, ...]:
    """Return the views that undo a chain of views."""
    return tuple(view.invert() for view in reversed(views))


def append_view(views: tuple[View, ...], view: View) -> tuple[View, ...] | None:
    """Return a chain with one more view, simplified; None if the chain takes no element.

    A block that is put into a tensor and taken out again leaves no trace, so that a chain shows
    which elements it takes.
    """
    if _changes_nothing(view):
        return views
    last = views[-1] if views else None
    if isinstance(view, Take) and isinstance(last, Take):
        shifted = zip(view.box.origin, last.box.origin, strict=True)
        box = Box(tuple(a + b for a, b in shifted), view.box.shape)
        return (*views[:-1], Take(last.shape, box))
    if isinstance(view, Take) and isinstance(last, Put):
        return _take_from_put(views[:-1], last, view.box)
    if isinstance(view, Reshape) and isinstance(last, Reshape):
        return append_view(views[:-1], Reshape(last.before, view.after))
    return (*views, view)


def _changes_nothing(view: View) -> bool:
    if isinstance(view, Reshape):
        return view.before == view.after
    if isinstance(view, Permute):
        return view.dims == tuple(range(len(view.dims)))
    return view.box == whole(view.shape)


def _take_from_put(views: tuple[View, ...], put: Put, taken: Box) -> tuple[View, ...] | None:
    inside = intersect(put.box, taken)
    if inside is None:
        return None
    chain = append_view(views, Take(put.box.shape, inside.within(put.box)))
    return None if chain is None else append_view(chain, Put(taken.shape, inside.within(taken)))


class _StoredBlock(NamedTuple):
    """A stored block along some dims of a tensor, with its offset relative to the whole block."""

    box: Box
    byte_offset: int
    byte_strides: Index


def _group_dims(before: Index, after: Index) -> list[tuple[range, range]]:
    """Return the smallest groups of neighbouring dims that have as many elements in both shapes.

    >>> _group_dims((2, 6, 5), (4, 3, 5))
    [(range(0, 2), range(0, 2)), (range(2, 3), range(2, 3))]
    """
    groups: list[tuple[range, range]] = []
    a = b = 0
    while a < len(before) or b < len(after):
        first_a, first_b = a, b
        size_a = size_b = 1
        while (a == first_a and b == first_b) or size_a != size_b:
            if size_a <= size_b and a < len(before):
                size_a *= before[a]
                a += 1
            else:
                size_b *= after[b]
                b += 1
        groups.append((range(first_a, a), range(first_b, b)))
    return groups


def _reshape_groups(
    chunk: Chunk, before: Index, after: Index, groups: Iterable[tuple[range, range]]
) -> Iterator[list[_StoredBlock]]:
    for old, new in groups:
        origin = tuple(chunk.box.origin[dim] for dim in old)
        shape = tuple(chunk.box.shape[dim] for dim in old)
        strides = tuple(chunk.byte_strides[dim] for dim in old)
        part = _StoredBlock(Box(origin, shape), 0, strides)
        sizes_before = tuple(before[dim] for dim in old)
        sizes_after = tuple(after[dim] for dim in new)
        if sizes_before == sizes_after:
            yield [part]
        else:
            runs = _flatten(part, sizes_before)
            yield [piece for run in runs for piece in _unflatten(run, sizes_after)]


def _flatten(part: _StoredBlock, shape: Index) -> Iterator[_StoredBlock]:
    # The last dims are joined as long as the file stores their elements at one distance.
    start, extent, stride, size = 0, 1, 0, 1
    dim = len(shape)
    while dim:
        count, step = part.box.shape[dim - 1], part.byte_strides[dim - 1]
        joins = size == 1 or (extent == size and step == stride * size)
        if count > 1 and not joins:
            break
        dim -= 1
        start += part.box.origin[dim] * size
        if count > 1:
            stride = step if extent == 1 else stride
            extent *= count
        size *= shape[dim]
    steps = row_major(shape[:dim], size)
    start += sum(a * s for a, s in zip(part.box.origin[:dim], steps, strict=True))
    for index in product(*(range(count) for count in part.box.shape[:dim])):
        begin = start + sum(n * s for n, s in zip(index, steps, strict=True))
        moved = sum(n * s for n, s in zip(index, part.byte_strides[:dim], strict=True))
        yield _StoredBlock(Box((begin,), (extent,)), part.byte_offset + moved, (stride,))


def _unflatten(run: _StoredBlock, shape: Index) -> Iterator[_StoredBlock]:
    (start,), (extent,), (stride,) = run.box.origin, run.box.shape, run.byte_strides
    steps = row_major(shape)
    for box in run_boxes(shape, start, start + extent):
        first = sum(o * s for o, s in zip(box.origin, steps, strict=True))
        strides = tuple(step * stride for step in steps)
        yield _StoredBlock(box, run.byte_offset + (first - start) * stride, strides)
