"""Quantised weights as computed bytes: the codes and scales of each matrix, computed by tiles.

A tile is a row of blocks, or several if a block has one row. Its values are read in float32, and
compared with those of a release that is quantised in the same way: a block with the same values
gets the bytes of the release. Values alone do not always determine the scale: a block can be zero,
e2m1 codes up to 3 are also codes up to 6 with half the scale, and bfloat16 rounds the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from reshard.box import Box, index_of, row_major, whole
from reshard.chunks import Chunk
from reshard.derived import Derived, Reader, list_files
from reshard.dtypes import BFLOAT16, FLOAT32
from reshard.errors import CorruptError
from reshard.manifest import PARAM, Entry
from reshard.move.tiles import TileReader, find_reader
from reshard.quantised.pairs import Pair

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Part = Literal["codes", "scales"]
PARTS: tuple[Part, Part] = ("codes", "scales")

_TILE = 1 << 19  # values of a tile if a block has one row
_PIECE = 1 << 16  # values; the arrays of a piece stay in the cache
_ARRAYS = 4  # of a tile in float32, with what is computed from it


def quantise(values: Entry, pair: Pair) -> tuple[Entry, Entry]:
    """Return codes and scales of a weight, which are computed when they are read.

    Args:
        values: the weight.
        pair: the codes and scales of a release, for a weight of this shape.
    """
    released = Entry(pair.fqn, PARAM, pair.weight.dtype, pair.shape, (pair.value_chunk,))
    numbers = range(pair.weight.matrices)
    matrices = [Matrix(values, pair, released, number) for number in numbers]
    return _build_entry(matrices, "codes"), _build_entry(matrices, "scales")


def _build_entry(matrices: Sequence[Matrix], part: Part) -> Entry:
    entry = matrices[0].find_stored(part)
    chunks = tuple(_build_chunk(matrix, part) for matrix in matrices)
    return Entry(entry.fqn, PARAM, entry.dtype, entry.shape, chunks)


def count_worker_nbytes(pair: Pair) -> int:
    """Return the memory that a thread needs to compute a tile, in bytes."""
    return _ARRAYS * FLOAT32.itemsize * _count_tile_rows(pair) * pair.weight.columns


def _count_tile_rows(pair: Pair) -> int:
    """Return the number of stored rows in a tile."""
    weight = pair.weight
    if weight.block[0] > 1 or weight.scales.dtype == FLOAT32:
        return weight.block[0]
    return min(max(_TILE // weight.columns, 1), weight.rows)


def _build_chunk(matrix: Matrix, part: Part) -> Chunk:
    box, dtype = matrix.find_box(part, 0, matrix.pair.weight.rows), matrix.find_stored(part).dtype
    strides = row_major(box.shape, dtype.itemsize)
    return Chunk(box, Computed(matrix, part).name, 0, strides, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One matrix of a weight, and how it is quantised.

    Args:
        values: the weight.
        pair: the release's codes and scales of this weight.
        released: the release's values.
        number: the number of the matrix among those of the weight.
    """

    values: Entry
    pair: Pair
    released: Entry
    number: int

    @property
    def tile_rows(self) -> int:
        """The number of stored rows in a tile."""
        return _count_tile_rows(self.pair)

    def find_stored(self, part: Part) -> Entry:
        """Return the release's codes or scales."""
        return self.pair.codes if part == "codes" else self.pair.scales

    def find_box(self, part: Part | Literal["values"], first: int, count: int) -> Box:
        """Return the box of some stored rows of this matrix in the weight, or in a stored part."""
        pair, weight = self.pair, self.pair.weight
        leading, rows = len(pair.shape) - 2, weight.rows
        shape = self.values.shape if part == "values" else self.find_stored(part).shape
        if part == "scales":
            if prod(shape) == 1:
                return whole(shape)
            high, rows = weight.block[0], weight.grid[0]
            first, count = first // high, -(-count // high)
        lead = shape[:leading]
        cuts = weight.matrices // max(prod(lead), 1)
        origin, extents = [*index_of(self.number // cuts, lead)], [1] * leading
        dim = leading + (weight.transposed and part == "values")
        origin += [0] * (len(shape) - leading)
        extents += shape[leading:]
        origin[dim], extents[dim] = self.number % cuts * rows + first, count
        return Box(tuple(origin), tuple(extents))

    def compute(self, first: int, reader: TileReader) -> dict[Part, Array]:
        """Return the codes and scales of the tile from a stored row on, as they are stored.

        Raises:
            CorruptError: a value is infinite or not a number.
        """
        import numpy as np

        count = min(self.tile_rows, self.pair.weight.rows - first)
        values = self._read_values(reader, self.values, "values", first, count)
        is_same = self._find_same(reader, values, first, count)
        if is_same.all():
            return self._read_stored(reader, first, count)
        computed = self._quantise(values)
        if not is_same.any():
            return computed
        stored = self._read_stored(reader, first, count)
        return {
            "codes": np.where(self._expand(is_same), stored["codes"], computed["codes"]),
            "scales": np.where(is_same, stored["scales"], computed["scales"]),
        }

    def _read_values(
        self, reader: TileReader, entry: Entry, slot: str, first: int, count: int
    ) -> Array:
        """Return some stored rows of a weight in float32, as a matrix in the weight's own order."""
        import numpy as np

        box = self.find_box("values", first, count)
        shape = box.shape[-2:]
        values = reader.keep(slot, shape, lambda: np.empty(shape, "<f4"))
        reader.read(entry, box, FLOAT32, values.data.cast("B"))
        return values

    def _read_stored(self, reader: TileReader, first: int, count: int) -> dict[Part, Array]:
        """Return the release's codes and scales of some rows: a line for each row of blocks."""
        import numpy as np

        high, stored = self.pair.weight.block[0], {}
        for part in PARTS:
            entry, box = self.find_stored(part), self.find_box(part, first, count)
            raw = bytearray(box.volume * entry.dtype.itemsize)
            reader.read(entry, box, entry.dtype, memoryview(raw))
            numbers = np.frombuffer(raw, f"<u{entry.dtype.itemsize}")
            stored[part] = numbers.reshape(count if part == "codes" else -(-count // high), -1)
        return stored

    def _find_same(self, reader: TileReader, values: Array, first: int, count: int) -> Array:
        """Return for each block whether it has the release's values, perhaps rounded to bfloat16.

        It has a line for each row of blocks as stored.
        """
        import numpy as np

        from reshard.move.cast import cast
        from reshard.quantised import encode

        weight = self.pair.weight
        released = self._read_values(reader, self.released, "released", first, count)
        same = encode.all_in_blocks(values.view("<u4") == released.view("<u4"), weight)
        if not same.all():
            rounded = reader.keep("rounded", values.shape, lambda: np.empty(values.shape, "<u2"))
            cast(released, rounded, FLOAT32, BFLOAT16, clamp=False)
            wide = rounded.astype("<u4") << 16
            same |= encode.all_in_blocks(values.view("<u4") == wide, weight)
        return same.T if weight.transposed else same

    def _quantise(self, values: Array) -> dict[Part, Array]:
        """Return codes and scales of a tile, as they are stored.

        Raises:
            CorruptError: a value is infinite or not a number.
        """
        import numpy as np

        from reshard.quantised import encode

        weight = self.pair.weight
        high = weight.value_block[0]
        axis = 0 if len(values) > high else 1
        pieces = [self._quantise_piece(piece) for piece in _cut(values, axis, weight.value_block)]
        codes, scales = (np.concatenate(parts, axis=axis) for parts in zip(*pieces, strict=True))
        if weight.packed:
            codes = encode.pack(codes, axis=0 if weight.transposed else 1)
        if weight.transposed:
            codes, scales = codes.T, scales.T
        return {"codes": codes, "scales": scales.view(f"<u{scales.itemsize}")}

    def _quantise_piece(self, values: Array) -> tuple[Array, Array]:
        import numpy as np

        from reshard.quantised import encode

        amax = encode.find_largest(values, self.pair.weight)
        if not np.isfinite(amax).all():
            raise CorruptError(
                self.values.chunks[0].file,
                f"{self.values.fqn!r} has infinite values or NaN, which have no scale",
                "the run has diverged or is damaged: use an earlier checkpoint of it",
            )
        scales = encode.choose_scales(values, amax, self.pair.weight)
        return encode.encode(values, scales, self.pair.weight), scales

    def _expand(self, is_same: Array) -> Array:
        """Return for each stored byte of codes what its block has, or for each byte of a row."""
        import numpy as np

        weight = self.pair.weight
        width, columns = weight.block[1], weight.columns
        if weight.packed:
            width, columns = width // 2, columns // 2
        expanded: Array = np.repeat(is_same, width, axis=1)[:, :columns]
        return expanded


def _cut(values: Array, axis: int, block: tuple[int, int]) -> list[Array]:
    """Return pieces of a tile that consist of whole blocks."""
    step = max(_PIECE // (values.shape[1 - axis] * block[axis]), 1) * block[axis]
    starts = range(0, values.shape[axis], step)
    if axis == 0:
        return [values[start : start + step] for start in starts]
    return [values[:, start : start + step] for start in starts]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The codes or the scales of a matrix; it implements `derived.Computation`."""

    matrix: Matrix
    part: Part

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._count_bytes(self.matrix.pair.weight.rows)

    @property
    def tile_nbytes(self) -> int:
        """The size of a tile in bytes."""
        return self._count_bytes(min(self.matrix.tile_rows, self.matrix.pair.weight.rows))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store the weight and the release's codes and scales."""
        pair = self.matrix.pair
        entries = (self.matrix.values, pair.codes, pair.scales)
        chunks = (chunk for entry in entries for chunk in entry.chunks)
        return tuple(dict.fromkeys(file for chunk in chunks for file in list_files(chunk.file)))

    @property
    def name(self) -> Derived:
        """The name under which the bytes can be read."""
        pair, values = self.matrix.pair, self.matrix.values
        detail = f"{self.part} of {values.fqn} like {pair.codes.chunks[0].file}"
        return Derived(values.chunks[0].file, f"{detail}, {self.matrix.number}", self)

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from an offset on.

        Raises:
            CorruptError: a value is infinite or not a number.
            ReshardError: a file cannot be read.
        """
        find_reader(pool).read_tiles(self, byte_offset, target)

    def compute(self, number: int, reader: TileReader) -> memoryview:
        """Return the bytes of a tile.

        Raises:
            CorruptError: a value is infinite or not a number.
        """
        import numpy as np

        matrix = self.matrix
        array = matrix.compute(number * matrix.tile_rows, reader)[self.part]
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def _count_bytes(self, rows: int) -> int:
        itemsize = self.matrix.find_stored(self.part).dtype.itemsize
        return self.matrix.find_box(self.part, 0, rows).volume * itemsize
