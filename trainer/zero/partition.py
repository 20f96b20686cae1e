"""Who owns which elements: the two ways in which DeepSpeed cuts parameters into flat tensors.

Stages 1 and 2 lay the parameters of a param group end to end and cut the whole into equal pieces
(deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8). Stage 3 cuts every parameter by itself
(deepspeed/runtime/zero/partition_parameters.py). One rank owning everything is the first way with
one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a flattened parameter, at ``offset`` of flat tensor ``flat``."""

    name: str
    start: int
    stop: int
    rank: int
    flat: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Flat:
    """One flat tensor of every rank."""

    names: tuple[str, ...]
    group: int
    """The param group whose hyper-parameters hold for it."""
    numel: int
    """Elements on each rank, padding included."""
    paddings: tuple[int, ...]
    """Elements of padding at the end of each rank's tensor."""


@dataclass(frozen=True)
class Partition:
    """The flat tensors of all ranks, and the runs that fill them."""

    world: int
    shapes: Shapes
    flats: tuple[Flat, ...]
    runs: dict[str, tuple[Run, ...]]

    def of_rank(self, rank: int) -> Iterator[Run]:
        """The runs of one rank, in model order."""
        for runs in self.runs.values():
            yield from (run for run in runs if run.rank == rank)

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def contiguous(groups: Sequence[Sequence[str]], shapes: Shapes, world: int) -> Partition:
    """Parameters of a group end to end, padded to a multiple of 2 x world, cut in equal pieces.

    >>> part = contiguous([["a", "b"]], {"a": (3,), "b": (2, 2)}, 2)
    >>> [(run.name, run.start, run.stop, run.rank) for run in part.of_rank(0)]
    [('a', 0, 3, 0), ('b', 0, 1, 0)]
    """
    flats, runs = [], {}
    for group, names in enumerate(groups):
        total = sum(math.prod(shapes[name]) for name in names)
        piece = 2 * math.ceil(total / (2 * world))
        paddings = tuple(piece - _overlap(0, total, rank * piece, piece) for rank in range(world))
        flats.append(Flat(tuple(names), group, piece, paddings))
        begin = 0
        for name in names:
            end = begin + math.prod(shapes[name])
            runs[name] = tuple(_cut(name, begin, end, piece, group))
            begin = end
    return Partition(world, shapes, tuple(flats), runs)


def _overlap(begin: int, end: int, start: int, length: int) -> int:
    return max(0, min(end, start + length) - max(begin, start))


def _cut(name: str, begin: int, end: int, piece: int, flat: int) -> Iterator[Run]:
    """Cut flat positions [begin, end) at multiples of ``piece``."""
    position = begin
    while position < end:
        rank, offset = divmod(position, piece)
        stop = min(end, (rank + 1) * piece)
        yield Run(name, position - begin, stop - begin, rank, flat, offset)
        position = stop


def by_parameter(
    groups: Sequence[Sequence[str]], shapes: Shapes, world: int, sub_group_size: int | None = None
) -> Partition:
    """Every parameter in ceil(numel / world) elements a rank; a rank's pieces end to end.

    Args:
        sub_group_size: a flat tensor is closed once a rank's piece of it has this many elements;
            None: one flat tensor for each of ``groups``.

    >>> part = by_parameter([["a"]], {"a": (5,)}, 2)
    >>> [(run.start, run.stop, run.rank) for run in part.runs["a"]]
    [(0, 3, 0), (3, 5, 1)]
    """
    flats: list[Flat] = []
    runs: dict[str, tuple[Run, ...]] = {}
    for group, names in enumerate(groups):
        for sub_group in _sub_groups(names, shapes, world, sub_group_size):
            offset = 0
            for name in sub_group:
                total = math.prod(shapes[name])
                piece = math.ceil(total / world)
                runs[name] = tuple(
                    Run(
                        name, rank * piece, min((rank + 1) * piece, total), rank, len(flats), offset
                    )
                    for rank in range(world)
                    if rank * piece < total
                )
                offset += piece
            flats.append(Flat(tuple(sub_group), group, offset, (0,) * world))
    order = {name: runs[name] for name in shapes if name in runs}
    return Partition(world, shapes, tuple(flats), order)


def _sub_groups(
    names: Sequence[str], shapes: Shapes, world: int, limit: int | None
) -> Iterator[list[str]]:
    current: list[str] = []
    held = 0
    for name in names:
        current.append(name)
        held += math.ceil(math.prod(shapes[name]) / world)
        if limit is not None and held >= limit:
            yield current
            current, held = [], 0
    if current:
        yield current
