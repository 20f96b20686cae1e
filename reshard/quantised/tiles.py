"""Quantised weights as computed bytes: the codes and scales of each matrix, computed by tiles.

A tile is some rows of blocks. Its values are read in bands and compared with those of a release
that is quantised in the same way: a block with the same values gets the bytes of the release.
Values alone do not always determine the scale: a block can be zero, e2m1 codes up to 3 are also
codes up to 6 with half the scale, and bfloat16 rounds the products.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from reshard.core.box import Box, index_of, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.computed import list_source_files
from reshard.core.dtypes import BFLOAT16, FLOAT32, DType
from reshard.core.manifest import PARAM, Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.errors import CorruptError
from reshard.quantised.weights import QuantisedPair
from reshard.system.derived import Derived, Reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

BlockPart = Literal["codes", "scales"]

_TILE = 1 << 20  # values
# A tile of transposed weights is best a whole expert (GPT-OSS: 16.6 million values), because its
# values are then contiguous in their file.
_TRANSPOSED_TILE = 20 << 20
_BAND_NBYTES = 2 << 20  # of values that are computed at a time, so that they stay in the cache
_CODE_BYTES = 4  # for each byte of codes in a tile: part of it, the release's, a mask, scales
_KEPT_BYTES = 112 << 20  # both weights of a layer of GPT-OSS 120B need 107 MiB
_BAND_BYTES = 16  # for each byte of a band: values, those of the release, and what is computed


def quantise(values: Entry, pair: QuantisedPair, kept: KeptScales) -> tuple[Entry, Entry]:
    """Return codes and scales of a weight, which are computed when they are read.

    Args:
        pair: the codes and scales of a release, for a weight of this shape. If its entries have no
            chunks, there is no release to compare with.
        kept: scales of all weights that were computed early.
    """
    released = Entry(pair.fqn, PARAM, pair.weight.dtype, pair.shape, (pair.value_chunk,))
    numbers = range(pair.weight.matrices)
    dtype = BFLOAT16 if values.stored_dtype == BFLOAT16 else FLOAT32
    matrices = [Matrix(values, dtype, pair, released, number, kept) for number in numbers]
    return _build_entry(matrices, "codes"), _build_entry(matrices, "scales")


def _build_entry(matrices: Sequence[Matrix], part: BlockPart) -> Entry:
    entry = matrices[0].find_stored(part)
    chunks = tuple(_build_chunk(matrix, part) for matrix in matrices)
    return Entry(entry.fqn, PARAM, entry.dtype, entry.shape, chunks)


def count_worker_nbytes(pair: QuantisedPair) -> int:
    """Return the memory that a thread needs to compute a tile, in bytes."""
    weight, rows = pair.weight, _count_tile_rows(pair)
    width = rows if weight.transposed else weight.columns
    band = max(_BAND_NBYTES, weight.value_block[0] * width * FLOAT32.itemsize)
    return _CODE_BYTES * rows * weight.row_nbytes + _BAND_BYTES * band


def _count_tile_rows(pair: QuantisedPair) -> int:
    weight = pair.weight
    high, values = weight.block[0], _TRANSPOSED_TILE if weight.transposed else _TILE
    return min(max(values // weight.columns // high, 1) * high, weight.rows)


def _build_chunk(matrix: Matrix, part: BlockPart) -> Chunk:
    rows, dtype = matrix.pair.weight.rows, matrix.find_stored(part).dtype
    box, tile = (matrix.find_box(part, 0, n) for n in (rows, min(matrix.tile_rows, rows)))
    nbytes, tile_nbytes = box.volume * dtype.itemsize, tile.volume * dtype.itemsize
    return contiguous(Computed(matrix, part, nbytes, tile_nbytes).name, 0, dtype, box)


class KeptScales:
    """Scales that were computed with one part of a tile, until the other part is computed.

    The plan has codes before scales, but several threads share it, and a file that is read in its
    order has fp32 scales first. Tiles for which there is no room are computed twice. A tile whose
    blocks all have the release's values needs no room, as its scales are those of the release.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scales: dict[tuple[str, int, int], tuple[Array, Array]] = {}  # the second as bits
        self._nbytes = 0
        # Whether the last band had the release's values in any block: a guess for the next one.
        self.had_same = True

    def __reduce__(self) -> tuple[type[KeptScales], tuple[()]]:
        """Return an empty one, for another process."""
        return KeptScales, ()

    def put(self, key: tuple[str, int, int], scales: Array, is_same: Array) -> None:
        """Keep the scales of a tile, and which blocks have the release's values."""
        import numpy as np

        if is_same.all():
            scales, is_same = scales[:0], is_same[:0]
        kept = scales.copy(), np.packbits(is_same)
        nbytes = sum(array.nbytes for array in kept)
        with self._lock:
            if key not in self._scales and self._nbytes + nbytes <= _KEPT_BYTES:
                self._scales[key] = kept
                self._nbytes += nbytes

    def take(self, key: tuple[str, int, int]) -> tuple[Array, Array] | None:
        """Return what `put` got for a tile, and keep it no longer.

        The arrays have no rows if all blocks have the release's values.
        """
        import numpy as np

        with self._lock:
            kept = self._scales.pop(key, None)
            if kept is None:
                return None
            self._nbytes -= sum(array.nbytes for array in kept)
        scales, bits = kept
        return scales, np.unpackbits(bits, count=scales.size).view(np.bool_).reshape(scales.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One matrix of a weight, and how it is quantised.

    Args:
        dtype: the dtype in which values are read: bfloat16 if they are stored so, or float32.
        pair: the release's codes and scales of this weight.
        released: the release's values.
        number: the number of the matrix among those of the weight.
        kept: scales that other tiles have left.
    """

    values: Entry
    dtype: DType
    pair: QuantisedPair
    released: Entry
    number: int
    kept: KeptScales

    @property
    def tile_rows(self) -> int:
        """The number of stored rows in a tile."""
        return _count_tile_rows(self.pair)

    def find_stored(self, part: BlockPart) -> Entry:
        """Return the release's codes or scales."""
        return self.pair.codes if part == "codes" else self.pair.scales

    def find_box(self, part: BlockPart | Literal["values"], first: int, count: int) -> Box:
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

    def compute(self, part: BlockPart, first: int, reader: TileReader, into: memoryview) -> None:
        """Fill ``into`` with the codes or scales of the tile from a stored row on."""
        import numpy as np

        weight, key = self.pair.weight, (self.values.fqn, self.number, first)
        count = min(self.tile_rows, weight.rows - first)
        kept = self.kept.take(key)
        if kept is not None and kept[1].all():
            entry = self.find_stored(part)
            reader.read(entry, self.find_box(part, first, count), entry.dtype, into)
            return
        if kept is not None and part == "scales":
            into[:] = kept[0].data.cast("B")
            return
        if weight.transposed:
            kept = None  # it has a line for each stored row, and tiles are computed by columns
        codes = None
        if part == "codes":
            codes = np.frombuffer(into, np.uint8).reshape(count, weight.row_nbytes)
        scales, is_same = self._compute_tile(codes, first, count, kept, reader)
        if kept is None:
            self._replace(scales, is_same, "scales", first, count, reader)
            self.kept.put(key, scales, is_same)
        if codes is None:
            into[:] = scales.data.cast("B")
        else:
            self._replace(codes, is_same, "codes", first, count, reader)

    def _compute_tile(
        self,
        codes: Array | None,
        first: int,
        count: int,
        kept: tuple[Array, Array] | None,
        reader: TileReader,
    ) -> tuple[Array, Array]:
        """Return the scales of a tile, and which blocks have the release's values; write its codes.

        Codes and scales are computed, not those of the release, and have a line for each stored row
        or row of blocks. They are undefined where all blocks of a band have the release's values.

        Args:
            codes: where to write the codes, or None if they are not needed.
            kept: the scales and which blocks have the release's values, if they are known.
        """
        import numpy as np

        from reshard.quantised import encode, loops

        weight, tile = self.pair.weight, self.find_box("values", first, count)
        (high, wide), (rows, columns) = weight.value_block, tile.shape[-2:]
        grid = -(-rows // high), -(-columns // wide)
        scales = np.zeros(grid, f"<u{self.pair.scales.dtype.itemsize}")
        is_same = np.zeros(grid, np.bool_)
        if kept is not None:
            scales, is_same = kept
        for start, stop in _cut(rows, high, _BAND_NBYTES // self.dtype.itemsize // columns):
            lines = slice(start // high, -(-stop // high))
            if kept is not None and is_same[lines].all():
                continue
            box = _take_rows(tile, start, stop)
            values = self._read_values(reader, self.values, self.dtype, box)
            if kept is None:
                is_same[lines] = self._find_same(reader, values, first + start, box)
                if is_same[lines].all():
                    continue
                scales[lines] = self._choose_scales(values, is_same[lines]).view(scales.dtype)
            if codes is not None and weight.transposed:
                # These codes are in the cache. A byte has those of two rows.
                made = np.empty((len(values) // 2, columns), np.uint8)
                encode.encode(values, scales[lines], weight, made)
                loops.transpose_into(codes, start // 2, made)
            elif codes is not None:
                encode.encode(values, scales[lines], weight, codes[start:stop])
        if weight.transposed:
            scales = loops.transpose(scales)
            is_same = loops.transpose(is_same.view(np.uint8)).view(np.bool_)
        return scales, is_same

    def _choose_scales(self, values: Array, is_same: Array) -> Array:
        import numpy as np

        from reshard.quantised import encode

        amax = encode.find_largest(values, self.pair.weight)
        if not (is_same | np.isfinite(amax)).all():
            raise CorruptError(
                self.values.chunks[0].file,
                f"{self.values.fqn!r} has infinite values or NaN, which have no scale",
                "the run has diverged or is damaged: use an earlier checkpoint of it",
            )
        return encode.choose_scales(values, amax, self.pair.weight)

    def _replace(
        self,
        computed: Array,
        is_same: Array,
        part: BlockPart,
        first: int,
        count: int,
        reader: TileReader,
    ) -> None:
        """Write the codes or scales of the release over those of blocks that have its values."""
        import numpy as np

        if not is_same.any():
            return
        stored = self._read_stored(part, first, count, reader)
        if is_same.all():
            computed[...] = stored
            return
        where = self._expand(is_same, count) if part == "codes" else is_same
        np.copyto(computed, stored, where=where)

    def _read_values(self, reader: TileReader, entry: Entry, dtype: DType, box: Box) -> Array:
        import numpy as np

        shape, kind = box.shape[-2:], "<u2" if dtype == BFLOAT16 else "<f4"
        slot = "values" if entry is self.values else "released"
        values = reader.keep(slot, (shape, kind), lambda: np.empty(shape, kind))
        reader.read(entry, box, dtype, values.data.cast("B"))
        return values

    def _find_same(self, reader: TileReader, values: Array, first: int, box: Box) -> Array:
        # After a training, no block has the release's values. If that was so in the last band, the
        # first value of each column of each block is compared before the others.
        weight = self.pair.weight
        if not self.pair.codes.chunks:
            return self._find_none(values)
        if not self.kept.had_same and weight.value_block[0] > 1:
            is_same = None
            if weight.transposed:
                is_same = self._compare_first_columns(reader, values, box)
            elif not weight.packed:
                is_same = self._compare_first_rows(reader, values, first)
            if is_same is not None and not is_same.any():
                return is_same
        is_same = self._compare(reader, values, first, box)
        self.kept.had_same = bool(is_same.any())
        return is_same

    def _find_none(self, values: Array) -> Array:
        import numpy as np

        sizes = zip(values.shape, self.pair.weight.value_block, strict=True)
        return np.zeros([-(-size // block) for size, block in sizes], np.bool_)

    def _compare_first_rows(self, reader: TileReader, values: Array, first: int) -> Array:
        import numpy as np

        weight, chunk = self.pair.weight, self.pair.codes.chunks[0]
        high, rows = weight.block[0], range(first, first + len(values))
        codes = np.empty((len(rows[::high]), weight.columns), np.uint8)
        for row, line in zip(rows[::high], codes, strict=True):
            # A plan for each row would take longer than the read.
            at = (self.number * weight.rows + row) * weight.columns
            reader.read_bytes(chunk.file, chunk.byte_offset + at, line.data)
        sample = np.ascontiguousarray(values[::high])
        return self._compare_codes(reader, sample, codes, rows, 1)

    def _compare_first_columns(self, reader: TileReader, values: Array, box: Box) -> Array:
        import numpy as np

        from reshard.quantised import encode

        weight, width = self.pair.weight, self.pair.weight.block[1]
        first = box.origin[-1] % weight.rows  # several matrices can lie behind one another
        released = reader.keep(
            "first values",
            (self, first),
            lambda: self._decode_first_codes(first, box.shape[-1], reader),
        )
        sample = np.ascontiguousarray(values[::width])
        line = box.origin[-2] // width
        return encode.compare(sample, released[line : line + len(sample)], 1, weight)

    def _decode_first_codes(self, first: int, count: int, reader: TileReader) -> Array:
        # The codes are taken where they are stored: to transpose all of them takes longer.
        import numpy as np

        from reshard.quantised import decode, loops

        scales = self._transpose_scales(first, count, reader)
        codes = self._read_stored("codes", first, count, reader)
        codes = np.ascontiguousarray(codes[:, :: self.pair.weight.block[1] // 2])
        # A byte has two codes, of which the first is used.
        values = np.empty((2 * codes.shape[1], count), "<u2")
        products = decode.build_products()
        loops.decode_columns(loops.transpose(codes), scales, products, (0, 0), 0, values)
        return np.ascontiguousarray(values[::2])

    def _compare(self, reader: TileReader, values: Array, first: int, box: Box) -> Array:
        """Return for each block whether it has the release's values, like `_find_same`."""
        from reshard.quantised import encode

        weight, count = self.pair.weight, len(values)
        if not weight.packed:
            codes = self._read_stored("codes", first, count, reader)
            rows = range(first, first + count)
            return self._compare_codes(reader, values, codes, rows, weight.block[0])
        if weight.transposed:
            return self._compare_columns(reader, values, box)
        released = self._read_values(reader, self.released, weight.dtype, box)
        return encode.compare(values, released, weight.value_block[0], weight)

    def _compare_columns(self, reader: TileReader, values: Array, box: Box) -> Array:
        from reshard.quantised import encode, loops

        weight, width = self.pair.weight, self.pair.weight.block[1]
        (column, row), (columns, rows) = box.origin[-2:], values.shape
        first, lines = row % weight.rows, slice(column // width, -(-(column + columns) // width))
        scales = self._transpose_scales(first, rows, reader)
        stored = self._read_stored("codes", first, rows, reader)
        codes = loops.transpose(stored, column // 2, columns // 2)  # two in a byte
        return encode.compare_columns(values, codes, scales[lines], weight)

    def _transpose_scales(self, first: int, count: int, reader: TileReader) -> Array:
        """Return the release's scales of some stored rows, transposed; the reader keeps them."""
        from reshard.quantised import decode, loops

        def transpose() -> Array:
            scales = self._read_stored("scales", first, count, reader)
            decode.check_exponents(self.pair.weight, scales, self.number, first)
            return loops.transpose(scales)

        return reader.keep("columns of scales", (self, first), transpose)

    def _compare_codes(
        self, reader: TileReader, values: Array, codes: Array, rows: range, high: int
    ) -> Array:
        """Return for each block of some stored rows whether it has the values of float8 codes."""
        from reshard.quantised import decode, encode

        weight = self.pair.weight
        stored = self._read_stored("scales", rows.start, len(rows), reader)
        scales = encode.decode_stored(stored, weight.scales.dtype)
        line = rows.start // weight.block[0]
        line += 0 if weight.shared else self.number * weight.grid[0]
        decode.check_scales(weight, scales.reshape(-1), line * weight.grid[1])
        return encode.compare_codes(values, codes, scales, high, weight)

    def _read_stored(self, part: BlockPart, first: int, count: int, reader: TileReader) -> Array:
        """Return the release's codes or scales of some rows: a line for each row of blocks.

        They are kept until the reader reads others, and must not be changed.
        """
        import numpy as np

        entry, box = self.find_stored(part), self.find_box(part, first, count)
        lines = count if part == "codes" else -(-count // self.pair.weight.block[0])
        shape, dtype = (lines, box.volume // lines), f"<u{entry.dtype.itemsize}"
        stored = reader.keep(part, (shape, dtype), lambda: np.empty(shape, dtype))

        def read() -> Box:
            reader.read(entry, box, entry.dtype, stored.data.cast("B"))
            return box

        reader.keep(f"{part} at hand", (self, box), read)
        return stored

    def _expand(self, is_same: Array, rows: int) -> Array:
        import numpy as np

        weight = self.pair.weight
        high, width = weight.block
        if weight.packed:
            width //= 2
        expanded: Array = np.repeat(is_same, width, axis=1)[:, : weight.row_nbytes]
        return np.repeat(expanded, high, axis=0)[:rows] if high > 1 else expanded


def _cut(rows: int, high: int, most: int) -> Iterator[tuple[int, int]]:
    # A row of blocks with fewer rows than ``high`` is a band of its own; others have at most
    # ``most`` rows.
    step, even = max(most // high, 1) * high, rows // high * high
    for start in range(0, even, step):
        yield start, min(start + step, even)
    if even < rows:
        yield even, rows


def _take_rows(tile: Box, start: int, stop: int) -> Box:
    (*lead, first, left), (*ones, _, columns) = tile.origin, tile.shape
    return Box((*lead, first + start, left), (*ones, stop - start, columns))


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The codes or the scales of a matrix; it implements `derived.Computation`."""

    matrix: Matrix
    part: BlockPart
    nbytes: int
    tile_nbytes: int

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store the weight and the release's codes and scales."""
        pair = self.matrix.pair
        return list_source_files((self.matrix.values, pair.codes, pair.scales))

    @property
    def name(self) -> Derived:
        """The name under which the bytes can be read."""
        pair, values = self.matrix.pair, self.matrix.values
        first = values.chunks[0].file
        detail = f"of {values.fqn} like {pair.weight.codes.file}, {self.matrix.number}"
        codes = Derived(first, f"codes {detail}", self)
        return (
            codes
            if self.part == "codes"
            else Derived(first, f"scales {detail}", self, follows=str(codes))
        )

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from an offset on."""
        find_reader(pool).read_tiles(self, byte_offset, target)

    def compute(self, number: int, reader: TileReader, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tile."""
        self.matrix.compute(self.part, number * self.matrix.tile_rows, reader, into)
