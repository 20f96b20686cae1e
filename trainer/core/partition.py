"""DeepSpeed's two ways to cut parameters into flat tensors, of which each rank owns a part.

Stages 1 and 2 lay the parameters of a param group end to end and cut the whole into equal pieces
(deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8)::

    parameters   |aaaaaaaaaaa|bbbbb|cccccccc|..|      .. = padding
    ranks        |   rank 0    |    rank 1     |

Stage 3 cuts every parameter by itself (deepspeed/runtime/zero/partition_parameters.py)::

    parameters   |aaaaaaaaaaa.|bbbbb.|cccccccc|
    ranks        |  0  |  1   |0 | 1 | 0 | 1  |

One rank that owns everything is the first way with one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]
"""The shape of each parameter by name."""


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a flattened parameter: a run of elements, not of training.

    ``rank`` owns them. In its piece of flat tensor number ``flat``, they begin at ``offset``.
    """

    name: str
    start: int
    stop: int
    rank: int
    flat: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Flat:
    """A flat tensor that every rank has a piece of."""

    names: tuple[str, ...]
    group: int
    """Number of the param group whose hyper-parameters apply to it."""
    piece_numel: int
    """Elements of the piece of each rank, padding included."""
    paddings: tuple[int, ...]
    """Stages 1 and 2: elements of padding at the end of each rank's piece, which files record."""


@dataclass(frozen=True)
class Partition:
    """The flat tensors of all ranks, and the runs that fill them."""

    world: int
    shapes: Shapes
    flats: tuple[Flat, ...]
    runs: dict[str, tuple[Run, ...]]
    """The runs of each parameter, in the order of its elements."""

    def runs_of_rank(self, rank: int) -> Iterator[Run]:
        """Yield the runs of one rank, param group by param group."""
        for runs in self.runs.values():
            yield from (run for run in runs if run.rank == rank)

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def partition_groups(groups: Sequence[Sequence[str]], shapes: Shapes, world: int) -> Partition:
    """Lay each group end to end, pad it to a multiple of 2 x world, and cut it in equal pieces.

    >>> part = partition_groups([["a", "b"]], {"a": (3,), "b": (2, 2)}, 2)
    >>> [(run.name, run.start, run.stop, run.rank) for run in part.runs_of_rank(0)]
    [('a', 0, 3, 0), ('b', 0, 1, 0)]
    """
    flats, runs = [], {}
    for group, names in enumerate(groups):
        total = sum(math.prod(shapes[name]) for name in names)
        # The 2 is DeepSpeed's nccl_start_alignment_factor.
        piece = 2 * math.ceil(total / (2 * world))
        paddings = tuple(min(piece, max(0, end * piece - total)) for end in range(1, world + 1))
        flats.append(Flat(tuple(names), group, piece, paddings))
        begin = 0
        for name in names:
            end = begin + math.prod(shapes[name])
            runs[name] = tuple(_cut_at_pieces(name, begin, end, piece, group))
            begin = end
    return Partition(world, shapes, tuple(flats), runs)


def _cut_at_pieces(name: str, begin: int, end: int, piece: int, flat: int) -> Iterator[Run]:
    """Cut flat positions [begin, end) of a parameter at multiples of ``piece``."""
    position = begin
    while position < end:
        rank, offset = divmod(position, piece)
        stop = min(end, (rank + 1) * piece)
        yield Run(name, position - begin, stop - begin, rank, flat, offset)
        position = stop


def partition_each_parameter(
    groups: Sequence[Sequence[str]], shapes: Shapes, world: int, sub_group_size: int | None = None
) -> Partition:
    """Cut every parameter into pieces of ceil(numel / world); lay those of a rank end to end.

    Args:
        groups: names of the parameters of each param group.
        shapes: the shapes of the parameters by name.
        world: number of ranks.
        sub_group_size: close a flat tensor once a rank's piece of it has this many elements;
            None: one flat tensor for each of ``groups``.

    >>> part = partition_each_parameter([["a"]], {"a": (5,)}, 2)
    >>> [(run.start, run.stop, run.rank) for run in part.runs["a"]]
    [(0, 3, 0), (3, 5, 1)]
    """
    flats: list[Flat] = []
    runs: dict[str, tuple[Run, ...]] = {}
    for group, names in enumerate(groups):
        for sub_group in _split_into_sub_groups(names, shapes, world, sub_group_size):
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
    return Partition(world, shapes, tuple(flats), runs)


def _split_into_sub_groups(
    names: Sequence[str], shapes: Shapes, world: int, limit: int | None
) -> Iterator[list[str]]:
    current: list[str] = []
    own_numel = 0
    for name in names:
        current.append(name)
        own_numel += math.ceil(math.prod(shapes[name]) / world)
        if limit is not None and own_numel >= limit:
            yield current
            current, own_numel = [], 0
    if current:
        yield current
