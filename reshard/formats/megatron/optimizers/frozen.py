"""Find which parameters the optimizer of a run with frozen parameters has, by their values.

No file states which parameters are frozen. An optimizer lists its masters, or lays them into flat
buffers, in the order of the parameters, and a 16-bit weight is the cast of its master. So a
parameter whose values are those of the next master is trained, and any other one is frozen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import isclose, prod
from typing import NamedTuple

from reshard.containers.torch_objects import read_weight
from reshard.core.box import Box, Index, index_of, row_major, whole
from reshard.core.chunks import Chunk
from reshard.formats.megatron.optimizers.buckets import ALIGNMENT, Param
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.system.files import SourceFiles
from reshard.units import round_up

_SAMPLED = 8  # elements of a parameter
_REL, _ABS = 2.0**-7, 1e-30  # a cast to bfloat16 rounds to 8 bits

Element = tuple[int, float]  # position in the flattened parameter of the rank, and value
Sample = Callable[[str], Sequence[Element]]  # some elements of a parameter, by its name
ReadMaster = Callable[[int], float]  # an element of a master, by its flat position


class Ambiguous(Exception):  # noqa: N818 - an answer, which the caller turns into an error
    """Several parameters have the values of one master."""


class _Assignment(NamedTuple):
    param: Param
    read: ReadMaster | None


def sample_tensor(shape: Index, chunks: Sequence[Chunk], files: SourceFiles) -> list[Element]:
    """Return elements of a whole parameter."""
    return sample_block(shape, chunks, whole(shape), whole(shape), files)


def sample_block(
    shape: Index, chunks: Sequence[Chunk], block: Box, piece: Box, files: SourceFiles
) -> list[Element]:
    """Return elements of a rank's piece of a parameter.

    Args:
        block, piece: a block of the whole parameter, and where the rank's piece has it.
    """
    found: list[Element] = []
    for at in _list_positions(block.volume):
        index = index_of(at, block.shape)
        value = _read_element(chunks, _add(block.origin, index), files)
        if value is not None:
            found.append((_flatten(_add(piece.origin, index), shape), value))
    return found


def transpose_elements(elements: Iterable[Element], shape: Index) -> list[Element]:
    """Return elements of a matrix of a shape with their positions in the transposed matrix."""
    rows, columns = shape
    return [(at % columns * rows + at // columns, value) for at, value in elements]


def _read_element(
    chunks: Iterable[Chunk], index: Sequence[int], files: SourceFiles
) -> float | None:
    for chunk in chunks:
        inner = [i - o for i, o in zip(index, chunk.box.origin, strict=True)]
        if all(0 <= i < n for i, n in zip(inner, chunk.box.shape, strict=True)):
            return read_weight(files, chunk, _flatten(inner, chunk.box.shape))
    return None


def _add(origin: Index, index: Index) -> list[int]:
    return [o + i for o, i in zip(origin, index, strict=True)]


def _flatten(index: Sequence[int], shape: Sequence[int]) -> int:
    return sum(i * step for i, step in zip(index, row_major(shape), strict=True))


def _list_positions(numel: int) -> list[int]:
    last, steps = numel - 1, _SAMPLED - 1
    return sorted({last * step // steps for step in range(_SAMPLED)}) if numel else []


class FlatMasters:
    """The masters in a flat buffer, from its first element on (`buckets.make_buckets`).

    Args:
        size: elements that close a bucket; None: only a shared parameter closes one.
        pieces: the buffer without padding at the ends of buckets: first elements and 1-d chunks.
    """

    def __init__(
        self, size: int | None, pieces: Sequence[tuple[int, Chunk]], files: SourceFiles
    ) -> None:
        self._size = size
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._starts = [start for start, _ in self._pieces]
        self._numel = max((start + c.box.volume for start, c in self._pieces), default=0)
        self._files = files
        self._base = 0  # of the bucket
        self._end = 0  # in the bucket

    def _place(self, param: Param) -> tuple[int, int]:
        start = round_up(self._end, ALIGNMENT)
        return (self._base + start, 0) if param.alone and self._end else (self._base, start)

    def offer(self, param: Param) -> ReadMaster | None:
        """Return the reader of the next master if the buffer has room for the parameter."""
        at = sum(self._place(param))
        if at + prod(param.shape) > self._numel:
            return None
        return lambda position: self._read(at + position)

    def take(self, param: Param) -> None:
        """Assign the next master to a parameter."""
        self._base, start = self._place(param)
        self._end = start + prod(param.shape)
        if param.alone or (self._size is not None and self._end >= self._size):
            self._base, self._end = self._base + self._end, 0

    def _read(self, at: int) -> float:
        number = bisect_right(self._starts, at) - 1
        start, chunk = self._pieces[number] if number >= 0 else (0, None)
        if chunk is None or at - start >= chunk.box.volume:
            return float("nan")  # no file stores the gaps between parameters
        return read_weight(self._files, chunk, at - start)


class ListedMasters:
    """The masters of a param group, a tensor each."""

    def __init__(self, tensors: Sequence[GlobalTensor], files: SourceFiles) -> None:
        self._tensors = tensors
        self._files = files
        self._next = 0

    def offer(self, param: Param) -> ReadMaster | None:
        """Return the reader of the next master if it has the shape of the parameter."""
        if self._next == len(self._tensors):
            return None
        tensor = self._tensors[self._next]
        if tensor.shape != param.shape or len(tensor.chunks) != 1:
            return None
        return lambda position: read_weight(self._files, tensor.chunks[0], position)

    def take(self, _param: Param) -> None:
        """Assign the next master to a parameter."""
        self._next += 1


def choose_trained(
    params: Sequence[Param], masters: FlatMasters | ListedMasters, sample: Sample
) -> list[Param]:
    """Return the parameters that have a master, in their order.

    Args:
        params: in the order of the masters.

    Raises:
        Ambiguous: the values of one master are those of several parameters.
    """
    placed: list[_Assignment] = []
    for param in params:
        read = masters.offer(param)
        if read is not None and _has_values(param, read, sample):
            masters.take(param)
            placed.append(_Assignment(param, read))
        else:
            placed.append(_Assignment(param, None))
    # A frozen parameter can only stand for a master with no other master in between.
    trained = [number for number, assignment in enumerate(placed) if assignment.read]
    for low, high in pairwise([-1, *trained, len(placed)]):
        for assignment in placed[low + 1 : high]:
            for neighbour in (low, high):
                if 0 <= neighbour < len(placed) and _fits_master(
                    assignment.param, placed[neighbour], sample
                ):
                    raise Ambiguous(f"{assignment.param.fqn} and {placed[neighbour].param.fqn}")
    return [assignment.param for assignment in placed if assignment.read]


def _fits_master(param: Param, placed: _Assignment, sample: Sample) -> bool:
    same = prod(param.shape) == prod(placed.param.shape)
    return same and placed.read is not None and _has_values(param, placed.read, sample)


def _has_values(param: Param, read: ReadMaster, sample: Sample) -> bool:
    elements = sample(param.fqn)
    return bool(elements) and all(
        isclose(value, read(position), rel_tol=_REL, abs_tol=_ABS) for position, value in elements
    )
