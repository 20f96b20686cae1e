"""The map of a checkpoint's bytes: one row per rank, and on it one piece per tensor.

A map must stay small with a thousand ranks, where every rank stores a piece of every tensor. Ranks
whose files have the same layout therefore share one list of pieces: in the i-th of these rows, a
piece begins at element ``start + i * step`` of its tensor. If that is still too much, neighbouring
pieces are drawn as one, and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter, mul
from typing import Any, NamedTuple

from reshard.core.box import Index, row_major
from reshard.core.manifest import Entry, Manifest, Skeleton
from reshard.system.paths import find_rank, shorten_names
from reshard.units import make_natural_key

MOST_PIECES = 100_000  # per map; about 5 MB before compression


class MapPiece(NamedTuple):
    """The bytes of one row that belong to one tensor, without a gap. There may be millions.

    Args:
        offset: bytes from the start of the row to the first byte.
        tensor: number of the entry.
        start: first element in the flattened tensor.
        shape: shape of the stored box; None for a run of elements that is not a box.
        more: number of neighbours of the same kind that are drawn with this piece.
    """

    offset: int
    nbytes: int
    tensor: int
    start: int
    shape: Index | None
    more: int = 0


@dataclass(frozen=True, slots=True)
class MapRow:
    """The files of one rank, one after the other; or files that belong to no rank.

    Args:
        rank: None if the names of the files state no rank.
    """

    label: str
    rank: int | None
    files: tuple[int, ...]
    pieces: tuple[MapPiece, ...]


@dataclass(frozen=True, slots=True)
class Shards:
    """One side of a map: the files, their rows, and the tensors in them.

    Args:
        files: (path relative to the checkpoint, bytes).
        kinds: bytes by kind.
        undrawn: files without tensors, which have no row.
        coarse: pieces smaller than this many bytes are drawn with their neighbours; 0: none.
    """

    title: str
    files: tuple[tuple[str, int], ...]
    rows: tuple[MapRow, ...]
    tensors: tuple[Entry, ...]
    kinds: Mapping[str, int]
    undrawn: tuple[int, ...] = ()
    coarse: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page. A row names its layout, and its number in that layout."""
        shapes: dict[Index, int] = {}
        layouts = _RowLayouts(shapes)
        rows = [
            [row.label, row.rank, list(row.files), *layouts.add(row.pieces)] for row in self.rows
        ]
        tensors = [
            [e.fqn, e.kind, str(e.dtype), shapes.setdefault(e.shape, len(shapes)), _get_itemsize(e)]
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


def _get_itemsize(entry: Entry) -> int:
    return (entry.chunks[0].dtype if entry.chunks else entry.dtype).itemsize


def map_manifest(title: str, manifest: Manifest) -> Shards:
    """Build the map of a checkpoint that was read."""
    files = {path: file.nbytes for path, file in manifest.files.items()}
    return _build_shards(title, manifest.entries.values(), files, shorten_names(files))


def map_skeleton(title: str, skeleton: Skeleton) -> Shards:
    """Build the map of a checkpoint that will be written."""
    files = {file.name: file.nbytes for file in skeleton.files}
    return _build_shards(title, skeleton.entries, files, {name: name for name in files})


def _build_shards(
    title: str,
    entries: Iterable[Entry],
    files: Mapping[str, int],
    names: Mapping[str, str],
) -> Shards:
    tensors = tuple(entries)
    pieces_of = _collect_pieces(tensors)
    paths = sorted(files, key=lambda path: make_natural_key(names[path]))
    numbers = {path: number for number, path in enumerate(paths)}
    rows, drawn = [], set()
    below = shorten_names(f"/{names[path]}" for path in paths if pieces_of.get(path))
    labels = {path: below.get(f"/{names[path]}", names[path]) for path in paths}
    for label, rank, members in _group_into_rows(paths, labels):
        if rank is not None or any(pieces_of.get(path) for path in members):
            pieces = tuple(_shift_pieces(members, files, pieces_of))
            rows.append(MapRow(label, rank, tuple(numbers[path] for path in members), pieces))
            drawn.update(members)
    kinds = _sum_kinds(rows, tensors)
    coarse, rows = _coarsen(rows)
    listed = tuple((names[path], files[path]) for path in paths)
    undrawn = tuple(numbers[path] for path in paths if path not in drawn)
    return Shards(title, listed, tuple(rows), tensors, kinds, undrawn, coarse)


def _sum_kinds(rows: Iterable[MapRow], tensors: Sequence[Entry]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in rows:
        for piece in row.pieces:
            kind = tensors[piece.tensor].kind
            sizes[kind] = sizes.get(kind, 0) + piece.nbytes
    return sizes


def _group_into_rows(
    paths: Sequence[str], labels: Mapping[str, str]
) -> Iterator[tuple[str, int | None, list[str]]]:
    # A universal checkpoint has one directory per parameter; all shards of a model are in one.
    ranks: dict[int, list[str]] = {}
    others: dict[str, list[str]] = {}
    for path in paths:
        rank = find_rank(labels[path])
        if rank is not None:
            ranks.setdefault(rank, []).append(path)
        else:
            directory = labels[path].rpartition("/")[0]
            others.setdefault(directory or labels[path], []).append(path)
    yield from ((f"rank {rank}", rank, ranks[rank]) for rank in sorted(ranks))
    yield from ((label, None, members) for label, members in others.items())


def _shift_pieces(
    members: Iterable[str], files: Mapping[str, int], pieces_of: Mapping[str, Sequence[MapPiece]]
) -> Iterator[MapPiece]:
    start = 0
    for path in members:
        for piece in pieces_of.get(path, ()):
            yield piece._replace(offset=start + piece.offset) if start else piece
        start += files[path]


def _collect_pieces(tensors: Sequence[Entry]) -> dict[str, list[MapPiece]]:
    by_file: dict[str, list[MapPiece]] = {}
    for number, entry in enumerate(tensors):
        for file, piece in _join_chunks(number, entry):
            by_file.setdefault(file, []).append(piece)
    for pieces in by_file.values():
        pieces.sort(key=itemgetter(0, 2, 3))  # not by shape, which may be None
    return by_file


def _join_chunks(number: int, entry: Entry) -> Iterator[tuple[str, MapPiece]]:
    # A run of a partition is stored as several chunks, in order, which are joined.
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
            yield file, MapPiece(offset, stop - offset, number, start, shape)
        file, offset, stop, start, shape = chunk.file, first, end, at, box.shape
        next_start = at + box.volume
    if next_start >= 0:
        yield file, MapPiece(offset, stop - offset, number, start, shape)


def _is_run(box: Index, shape: Index) -> bool:
    """Return whether a box is a run of the flattened tensor: whole in every dim after its first.

    >>> _is_run((1, 2, 4), (3, 3, 4)), _is_run((2, 2, 4), (3, 3, 4))
    (True, False)
    """
    first = next((dim for dim, size in enumerate(box) if size > 1), len(shape))
    return box[first + 1 :] == shape[first + 1 :]


def _coarsen(rows: list[MapRow]) -> tuple[int, list[MapRow]]:
    if _count_distinct(rows) <= MOST_PIECES:
        return 0, rows
    sizes = [sum(piece.nbytes for piece in row.pieces) for row in rows]
    smallest = max(sum(sizes) // MOST_PIECES, 1)
    while True:
        joined = [replace(row, pieces=_join_small(row.pieces, smallest)) for row in rows]
        # Beyond the size of the largest row, every row is one piece already.
        if _count_distinct(joined) <= MOST_PIECES or smallest > max(sizes):
            return smallest, joined
        smallest *= 2


def _count_distinct(rows: Iterable[MapRow]) -> int:
    layouts = _RowLayouts({})
    for row in rows:
        layouts.add(row.pieces)
    return layouts.pieces


def _join_small(pieces: Sequence[MapPiece], smallest: int) -> tuple[MapPiece, ...]:
    result: list[MapPiece] = []
    largest = 0  # bytes of the largest piece in the last joined one
    for piece in pieces:
        last = result[-1] if result else None
        near = last is not None and piece.offset - (last.offset + last.nbytes) < smallest
        if last is None or last.nbytes >= smallest or not near:
            result.append(piece)
            largest = piece.nbytes
            continue
        stop = max(piece.offset + piece.nbytes, last.offset + last.nbytes)
        tensor = piece.tensor if piece.nbytes > largest else last.tensor
        largest = max(largest, piece.nbytes)
        result[-1] = MapPiece(last.offset, stop - last.offset, tensor, 0, None, last.more + 1)
    return tuple(result)


@dataclass(slots=True)
class _RowLayout:
    """Rows whose pieces have the same offsets, and whose first elements grow evenly."""

    pieces: Sequence[MapPiece]
    starts: list[int]
    steps: list[int] | None = None
    count: int = 1

    def accepts(self, starts: list[int]) -> bool:
        """Return whether the next row fits the pattern; if it does, count it."""
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
class _RowLayouts:
    shapes: dict[Index, int]
    pieces: int = 0
    _all: list[_RowLayout] = field(default_factory=list)
    _open: dict[object, int] = field(default_factory=dict)  # key -> the last layout that has it

    def add(self, pieces: Sequence[MapPiece]) -> tuple[int, int]:
        key = tuple((p.offset, p.nbytes, p.tensor, p.shape, p.more) for p in pieces)
        starts = [piece.start for piece in pieces]
        number = self._open.get(key)
        if number is not None and self._all[number].accepts(starts):
            return number, self._all[number].count - 1
        self._open[key] = len(self._all)
        self._all.append(_RowLayout(pieces, starts))
        self.pieces += len(pieces)
        return len(self._all) - 1, 0

    def to_json(self) -> list[dict[str, list[int]]]:
        """Return one column per property; ``shape`` is an index into the shapes, or -1."""
        return [
            {
                "offset": [piece.offset for piece in layout.pieces],
                "nbytes": [piece.nbytes for piece in layout.pieces],
                "tensor": [piece.tensor for piece in layout.pieces],
                "shape": [self._number_shape(piece.shape) for piece in layout.pieces],
                "start": layout.starts,
                "step": layout.steps or [0] * len(layout.pieces),
                "more": [piece.more for piece in layout.pieces],
            }
            for layout in self._all
        ]

    def _number_shape(self, shape: Index | None) -> int:
        return -1 if shape is None else self.shapes.setdefault(shape, len(self.shapes))
