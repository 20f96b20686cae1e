"""The block of a tensor that a rank stores, from the pairs of slices in the header of its weights.

``local_global_slices_pairs`` is ``local#global;local#global;...``; a side is
``start,stop,step|...`` with one slice per dim (nanotron ``parallel/parameters.py``, SlicesPair).
There are several pairs if the parts of a fused parameter (query, key and value; gate and up) are
cut one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard.core.box import Box, Index, as_index, flat_span, intersect, row_major, run_boxes, whole
from reshard.core.chunks import Chunk
from reshard.errors import ALTERED, CorruptError, UnsupportedError

SHAPE, PAIRS = "unsharded_shape", "local_global_slices_pairs"
_SIZE = re.compile(r"(?:np\.\w+\()?(\d{1,19})\)?")  # numpy 2 prints np.int64(8)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's part of a tensor of ``shape``: its own shape, and (local, global) boxes."""

    shape: Index
    local: Index
    pairs: tuple[tuple[Box, Box], ...]

    def list_chunks(self, stored: Chunk) -> Iterator[Chunk]:
        """Yield the chunks of a stored tensor that has the rank's shape."""
        for local, box in self.pairs:
            steps = zip(local.origin, stored.byte_strides, strict=True)
            at = stored.byte_offset + sum(origin * stride for origin, stride in steps)
            yield Chunk(box, stored.file, at, stored.byte_strides, stored.dtype)

    def list_run_chunks(self, stored: Chunk, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the chunks of a stored flat piece: the run ``[start, stop)`` of the rank's part."""
        unit = stored.byte_strides[0] if stored.byte_strides else stored.dtype.itemsize
        strides = row_major(self.local, unit)
        for block, box in self._list_blocks(start, stop):
            at = stored.byte_offset + (flat_span(block, self.local)[0] - start) * unit
            yield Chunk(box, stored.file, at, strides, stored.dtype)

    def list_runs(self, start: int, stop: int) -> Iterator[tuple[Box, int]]:
        """Yield the blocks of the whole that make up the run ``[start, stop)`` of the rank's part.

        Each is contiguous in the run, and comes with the element of the run at which it begins.
        """
        for block, box in self._list_blocks(start, stop):
            for row in _split_contiguous(block, self.local):
                whole_row = row.within(block).shift(box.origin)
                yield whole_row, flat_span(row, self.local)[0] - start

    def _list_blocks(self, start: int, stop: int) -> Iterator[tuple[Box, Box]]:
        """Yield (block of the rank's part, block of the whole) of a run of the rank's part."""
        for piece in run_boxes(self.local, start, stop):
            for local, box in self.pairs:
                block = intersect(piece, local)
                if block is not None:
                    yield block, block.within(local).shift(box.origin)


def make_whole_part(shape: Index) -> TensorShard:
    """Return the part of a rank that stores the whole tensor."""
    return TensorShard(shape, shape, ((whole(shape), whole(shape)),))


def parse_part(path: str, metadata: Mapping[str, str], local: Index) -> TensorShard:
    """Return the part that the header of a rank's weights states, else the whole tensor.

    Args:
        local: the shape of the tensor in the file.

    Raises:
        CorruptError: the text is malformed, or contradicts the tensor.
        UnsupportedError: a slice has a step.
    """
    if PAIRS not in metadata or SHAPE not in metadata:
        return make_whole_part(local)
    try:
        sizes = metadata[SHAPE].strip()[1:-1].split(",")
        shape = as_index((_parse_size(text) for text in sizes if text.strip()), len(local))
        texts = [pair.split("#") for pair in metadata[PAIRS].split(";")]
        pairs = tuple((_parse_box(path, a, local), _parse_box(path, b, shape)) for a, b in texts)
    except (ValueError, TypeError) as error:
        raise CorruptError(
            path, f"its header does not state its part of the tensor: {error}", ALTERED
        ) from error
    if any(a.shape != b.shape for a, b in pairs):
        raise CorruptError(path, f"its local and global slices differ in size: {pairs}")
    # Elements outside every pair would be lost.
    if sum(a.volume for a, _ in pairs) != whole(local).volume:
        raise CorruptError(path, f"its slices do not cover its tensor of {local}")
    return TensorShard(shape, local, pairs)


def _split_contiguous(box: Box, shape: Index) -> Iterator[Box]:
    start, stop = flat_span(box, shape)
    if stop - start == box.volume:
        yield box
        return
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    for index in range(box.shape[dim]):
        origin, extents = list(box.origin), list(box.shape)
        origin[dim], extents[dim] = origin[dim] + index, 1
        yield from _split_contiguous(Box(tuple(origin), tuple(extents)), shape)


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    return int(match[1])


def _parse_box(path: str, text: str, shape: Index) -> Box:
    ranges = []
    for part, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if n == "None" else int(n) for n in part.split(","))
        if step not in (None, 1):
            raise UnsupportedError(path, f"its slices have a step of {step}")
        # `indices` clips bounds that lie outside and shifts negative ones: both are refused below.
        low, high, _ = slice(start, stop).indices(size)
        if (start or 0) != low or (size if stop is None else stop) != high or low > high:
            raise ValueError(f"{part!r} is not a slice of {size} elements")
        ranges.append((low, high))
    return Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
