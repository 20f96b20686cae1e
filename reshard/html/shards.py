"""Where the bytes of a checkpoint lie: a row a rank, and on it a piece a tensor.

A map must stay small at a thousand ranks, where every rank holds a piece of every tensor. Ranks
whose files are laid out alike therefore share one layout: the piece of the i-th of them begins at
element ``start + i * step`` of its tensor. What is still too much is drawn together, and said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter, mul
from pathlib import Path
from typing import Any, NamedTuple

from reshard.box import Index, row_major
from reshard.manifest import Entry, Manifest, Skeleton

MOST_PIECES = 100_000  # of a map; about 5 MB before compression
# ``mp_rank`` numbers tensor-parallel ranks: under DeepSpeed one file of all data-parallel ones.
_RANK = re.compile(r"(?:(?<!mp_)(?<![a-z])rank[-_]?|^__|/__)(\d+)")


class Piece(NamedTuple):
    """What one row holds of one tensor, without a gap. There may be millions.

    Args:
        offset: bytes from the start of the row to the first.
        tensor: number of the entry.
        start: its first element in the flattened tensor.
        shape: of the stored box; None for a run that is no box.
        more: neighbours of the same kind that are drawn with it.
    """

    offset: int
    nbytes: int
    tensor: int
    start: int
    shape: Index | None
    more: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The files of a rank, one after the other; or what belongs to no rank.

    Args:
        rank: None where the files' names say none.
    """

    label: str
    rank: int | None
    files: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Shards:
    """One side of a map: files, rows of them, and the tensors that lie there.

    Args:
        files: (path relative to the checkpoint, bytes).
        kinds: bytes by kind.
        undrawn: files without tensors, which have no row.
        coarse: pieces below these bytes are drawn together with their neighbours; 0: none.
    """

    title: str
    files: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]
    tensors: tuple[Entry, ...]
    kinds: Mapping[str, int]
    undrawn: tuple[int, ...] = ()
    coarse: int = 0

    def to_json(self) -> dict[str, Any]:
        """The data of the page: rows name a layout, and which of its rows they are."""
        shapes: dict[Index, int] = {}
        layouts = _Layouts(shapes)
        rows = [
            [row.label, row.rank, list(row.files), *layouts.add(row.pieces)] for row in self.rows
        ]
        tensors = [
            [e.fqn, e.kind, str(e.dtype), shapes.setdefault(e.shape, len(shapes)), _itemsize(e)]
            for e in self.tensors
        ]
        return {
            "title": self.title,
            "files": [list(file) for file in self.files],
            "rows": rows,
            "layouts": layouts.to_json(),
            "tensors": tensors,
            "kinds": [list(kind) for kind in self.kinds.items()],
            "shapes": [list(shape) for shape in shapes],
            "coarse": self.coarse,
            "undrawn": list(self.undrawn),
        }


def _itemsize(entry: Entry) -> int:
    """Of an element as it is stored."""
    return (entry.chunks[0].dtype if entry.chunks else entry.dtype).itemsize


def of_manifest(title: str, manifest: Manifest, most: int = MOST_PIECES) -> Shards:
    """The map of a checkpoint that was read."""
    files = {path: file.nbytes for path, file in manifest.files.items()}
    return _shards(title, manifest.entries.values(), files, relative_names(files), most)


def relative_names(paths: Iterable[str]) -> dict[str, str]:
    """Path -> path below what all of them have in common."""
    listed = list(paths)
    root = os.path.commonpath([Path(path).parent for path in listed]) if listed else ""
    return {path: os.path.relpath(path, root).replace(os.sep, "/") for path in listed}


def of_skeleton(title: str, skeleton: Skeleton, most: int = MOST_PIECES) -> Shards:
    """The map of a checkpoint that is to be written."""
    files = {file.name: file.nbytes for file in skeleton.files}
    return _shards(title, skeleton.entries, files, {name: name for name in files}, most)


def _shards(
    title: str,
    entries: Iterable[Entry],
    files: Mapping[str, int],
    names: Mapping[str, str],
    most: int,
) -> Shards:
    tensors = tuple(entries)
    held = _pieces(tensors)
    paths = sorted(files, key=lambda path: _natural(names[path]))
    numbers = {path: number for number, path in enumerate(paths)}
    rows, drawn = [], set()
    below = relative_names(f"/{names[path]}" for path in paths if held.get(path))
    labels = {path: below.get(f"/{names[path]}", names[path]) for path in paths}
    for label, rank, members in _members(paths, labels):
        if rank is not None or any(held.get(path) for path in members):
            pieces = tuple(_placed(members, files, held))
            rows.append(Row(label, rank, tuple(numbers[path] for path in members), pieces))
            drawn.update(members)
    kinds = _kinds(rows, tensors)
    coarse, rows = _coarser(rows, most)
    listed = tuple((names[path], files[path]) for path in paths)
    undrawn = tuple(numbers[path] for path in paths if path not in drawn)
    return Shards(title, listed, tuple(rows), tensors, kinds, undrawn, coarse)


def _kinds(rows: Iterable[Row], tensors: Sequence[Entry]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        for piece in row.pieces:
            kind = tensors[piece.tensor].kind
            found[kind] = found.get(kind, 0) + piece.nbytes
    return found


def rank_of(name: str) -> int | None:
    """The rank that a file's name says it is of; None where it says none.

    >>> rank_of("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"), rank_of("__12_0.distcp")
    (3, 12)
    >>> rank_of("mp_rank_00_model_states.pt") is None
    True
    """
    match = _RANK.search(name)
    return int(match[1]) if match else None


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Numbers in names in their order."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def _members(
    paths: Sequence[str], labels: Mapping[str, str]
) -> Iterator[tuple[str, int | None, list[str]]]:
    """Rows in order: ranks by number, then what is of none, files of a directory below together.

    A universal checkpoint has a directory a parameter; shards of a model lie side by side.
    """
    ranks: dict[int, list[str]] = {}
    others: dict[str, list[str]] = {}
    for path in paths:
        rank = rank_of(labels[path])
        if rank is not None:
            ranks.setdefault(rank, []).append(path)
        else:
            directory = labels[path].rpartition("/")[0]
            others.setdefault(directory or labels[path], []).append(path)
    yield from ((f"rank {rank}", rank, ranks[rank]) for rank in sorted(ranks))
    yield from ((label, None, members) for label, members in others.items())


def _placed(
    members: Iterable[str], files: Mapping[str, int], held: Mapping[str, Sequence[Piece]]
) -> Iterator[Piece]:
    """The pieces of files that stand one after the other."""
    start = 0
    for path in members:
        for piece in held.get(path, ()):
            yield piece._replace(offset=start + piece.offset) if start else piece
        start += files[path]


def _pieces(tensors: Sequence[Entry]) -> dict[str, list[Piece]]:
    """File -> its pieces in the order in which they lie; offsets from the start of the file."""
    found: dict[str, list[Piece]] = {}
    for number, entry in enumerate(tensors):
        for file, piece in _joined(number, entry):
            found.setdefault(file, []).append(piece)
    for pieces in found.values():
        pieces.sort(key=itemgetter(0, 2, 3))
    return found


def _joined(number: int, entry: Entry) -> Iterator[tuple[str, Piece]]:
    """One piece where a tensor's chunks are neighbours in the file and in the tensor.

    A run of a partition is stored as several chunks, in order.
    """
    strides = row_major(entry.shape)
    file, offset, stop, start, next_start, shape = "", 0, 0, 0, -1, None
    for chunk in entry.chunks:
        box = chunk.box
        if not box.volume:
            continue
        at = sum(map(mul, box.origin, strides))
        first, end = chunk.byte_span
        if (file, stop, next_start) == (chunk.file, first, at) and _is_run(box.shape, entry.shape):
            stop, next_start, shape = end, at + box.volume, None
            continue
        if next_start >= 0:
            yield file, Piece(offset, stop - offset, number, start, shape)
        file, offset, stop, start, shape = chunk.file, first, end, at, box.shape
        next_start = at + box.volume
    if next_start >= 0:
        yield file, Piece(offset, stop - offset, number, start, shape)


def _is_run(box: Index, shape: Index) -> bool:
    """Whether a box is a run of the flattened tensor: whole in every dim after its first.

    >>> _is_run((1, 2, 4), (3, 3, 4)), _is_run((2, 2, 4), (3, 3, 4))
    (True, False)
    """
    first = next((dim for dim, size in enumerate(box) if size > 1), len(shape))
    return box[first + 1 :] == shape[first + 1 :]


def _coarser(rows: list[Row], most: int) -> tuple[int, list[Row]]:
    """The rows with at most so many distinct pieces, and below which size pieces were joined."""
    if _distinct(rows) <= most:
        return 0, rows
    sizes = [sum(piece.nbytes for piece in row.pieces) for row in rows]
    smallest = max(sum(sizes) // most, 1)
    while True:
        joined = [replace(row, pieces=_together(row.pieces, smallest)) for row in rows]
        if _distinct(joined) <= most or smallest > max(sizes):
            return smallest, joined
        smallest *= 2


def _distinct(rows: Iterable[Row]) -> int:
    """How many pieces are left where rows share a layout."""
    layouts = _Layouts({})
    for row in rows:
        layouts.add(row.pieces)
    return layouts.pieces


def _together(pieces: Sequence[Piece], smallest: int) -> tuple[Piece, ...]:
    """Neighbours as one piece, of the largest's tensor, until that is no longer small."""
    found: list[Piece] = []
    largest = 0  # of the pieces that are in the last one
    for piece in pieces:
        last = found[-1] if found else None
        near = last is not None and piece.offset - (last.offset + last.nbytes) < smallest
        if last is None or last.nbytes >= smallest or not near:
            found.append(piece)
            largest = piece.nbytes
            continue
        stop = max(piece.offset + piece.nbytes, last.offset + last.nbytes)
        tensor = piece.tensor if piece.nbytes > largest else last.tensor
        largest = max(largest, piece.nbytes)
        found[-1] = Piece(last.offset, stop - last.offset, tensor, 0, None, last.more + 1)
    return tuple(found)


@dataclass(slots=True)
class _Alike:
    """Rows whose pieces have the same places, and begin at elements that grow evenly."""

    pieces: Sequence[Piece]
    starts: list[int]
    steps: list[int] | None = None
    count: int = 1

    def takes(self, starts: list[int]) -> bool:
        """Whether the next row goes on as those before."""
        steps = self.steps
        if steps is None:
            steps = [b - a for a, b in zip(self.starts, starts, strict=True)]
        elif any(
            at != first + step * self.count
            for at, first, step in zip(starts, self.starts, steps, strict=True)
        ):
            return False
        self.steps = steps
        self.count += 1
        return True


@dataclass(slots=True)
class _Layouts:
    """The layouts of a map, each once."""

    shapes: dict[Index, int]
    pieces: int = 0
    _all: list[_Alike] = field(default_factory=list)
    _open: dict[object, int] = field(default_factory=dict)  # places -> the last layout of them

    def add(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """(layout, which of its rows) for the next row."""
        places = tuple((p.offset, p.nbytes, p.tensor, p.shape, p.more) for p in pieces)
        starts = [piece.start for piece in pieces]
        number = self._open.get(places)
        if number is not None and self._all[number].takes(starts):
            return number, self._all[number].count - 1
        self._open[places] = len(self._all)
        self._all.append(_Alike(pieces, starts))
        self.pieces += len(pieces)
        return len(self._all) - 1, 0

    def to_json(self) -> list[dict[str, list[int]]]:
        """A column a property; ``shape`` is a number of `Shards.to_json`'s shapes, -1 for none."""
        return [
            {
                "offset": [piece.offset for piece in each.pieces],
                "nbytes": [piece.nbytes for piece in each.pieces],
                "tensor": [piece.tensor for piece in each.pieces],
                "shape": [self._shape(piece.shape) for piece in each.pieces],
                "start": each.starts,
                "step": each.steps or [0] * len(each.pieces),
                "more": [piece.more for piece in each.pieces],
            }
            for each in self._all
        ]

    def _shape(self, shape: Index | None) -> int:
        return -1 if shape is None else self.shapes.setdefault(shape, len(self.shapes))
