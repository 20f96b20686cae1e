"""Weights with a LoRA product added: ``W + scale * left @ right``, computed tile by tile in fp32.

A tile is a block of whole rows. Its product is summed in steps of `_DEPTH` along the rank, in
order, by matrix products of a fixed size. They are so small that OpenBLAS computes each of them
with one thread (interface/gemm.c: up to 2**18 multiplications), so the bits do not depend on the
number of BLAS threads either: with more threads, OpenBLAS 0.3.31 sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from reshard.core.box import Box, Index, row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.core.manifest import Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.errors import CorruptError
from reshard.system.derived import Derived, Reader, list_files
from reshard.tensors.averages.sums import add

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Order = Literal["out_in", "in_out"]
"""The order of the last dims of a weight: (out, in) as in nn.Linear, (in, out) as in Conv1D."""

_TILE = 1 << 19  # elements; a window of 4 MiB holds two tiles
_HEIGHT = 64  # rows of one matrix product
_DEPTH = 64  # elements of the rank that one matrix product sums
_MULTIPLICATIONS = 1 << 18  # of one matrix product; see above
_SIZE = FLOAT32.itemsize


@dataclass(frozen=True, slots=True)
class Product:
    """A LoRA update of one weight.

    Args:
        layer: the adapted layer, for messages.
        a: ``lora_A``: (rank, in); of all experts (experts * rank, in).
        b: ``lora_B``: (out, rank); of all experts (out, rank * experts), experts last.
        scale: factor of the product.
        order: how the weight stores its dims.
        experts: number of experts that `a` and `b` contain; the first dim of the weight.
        magnitude: DoRA's length of every row, or None.
        singular: AdaLoRA's factor of every row of `a`: (rank, 1); or None.
    """

    layer: str
    a: Entry | None
    b: Entry
    scale: float
    order: Order = "out_in"
    experts: int = 1
    magnitude: Entry | None = None
    singular: Entry | None = None

    @property
    def nbytes(self) -> int:
        """The memory that a thread needs for the factors and for tiles, in bytes."""
        read = (self.a, self.b, self.magnitude, self.singular)
        factors = 2 * sum(entry.numel for entry in read if entry)  # as stored, and scaled
        # The base, the product, a tile that is read in parts, and a sum where numpy adds.
        return _SIZE * (factors + 4 * _TILE)


def add_product(base: Entry, product: Product) -> Entry:
    """Return an entry with the values of ``base`` and the product added; its chunks are computed.

    The dtype stays that of the base: the sum in fp32 is rounded once, to the dtype that is written.
    """
    shape = base.shape[1:] if product.experts > 1 else base.shape
    leads = [(expert,) for expert in range(product.experts)] if product.experts > 1 else [()]
    dtype = base.stored_dtype if base.stored_dtype in (BFLOAT16, FLOAT16) else FLOAT32
    chunks = tuple(_build_chunk(base, dtype, product, lead, shape) for lead in leads)
    return replace(base, chunks=chunks)


def _build_chunk(base: Entry, dtype: DType, product: Product, lead: Index, shape: Index) -> Chunk:
    box = Box((*lead, *(0 for _ in shape)), (*(1 for _ in lead), *shape))
    tile_rows = _choose_tile_rows(shape[0], prod(shape[1:]))
    file = MergedWeight(base, dtype, product, lead, shape, tile_rows).name
    return Chunk(box, file, 0, row_major(box.shape, _SIZE), FLOAT32)


@dataclass(frozen=True, slots=True, eq=False)
class MergedWeight:
    """One matrix of a merged weight, the weight of a layer or of one expert, in fp32.

    Args:
        base: the base model's tensor.
        dtype: the dtype in which it is read: its own if `add` takes it, or float32.
        product: what is added to it.
        lead: index of the expert in the first dim; empty for a tensor without experts.
        shape: the shape of the matrix; dims after the first one count as one.
        tile_rows: the number of rows in a tile.
    """

    base: Entry
    dtype: DType
    product: Product
    lead: Index
    shape: Index
    tile_rows: int

    @property
    def columns(self) -> int:
        """The number of columns."""
        return prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * _SIZE

    @property
    def tile_nbytes(self) -> int:
        """The size of a tile in bytes."""
        return self.tile_rows * self.columns * _SIZE

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store the base and the adapter."""
        product = self.product
        read = (self.base, product.a, product.b, product.magnitude, product.singular)
        chunks = (chunk for entry in read if entry for chunk in entry.chunks)
        return tuple(dict.fromkeys(file for chunk in chunks for file in list_files(chunk.file)))

    @property
    def name(self) -> Derived:
        """The name under which the values can be read."""
        first = self.base.chunks[0].file
        adapter = f"{self.product.b.fqn} of {self.product.b.chunks[0].file}"
        detail = ", ".join([f"{self.base.fqn} with {adapter}", *map(str, self.lead)])
        return Derived(first, detail, self)

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on.

        Raises:
            CorruptError: a value of the result is infinite or not a number.
            ReshardError: a file cannot be read.
        """
        find_reader(pool).read_tiles(self, byte_offset, target)

    def read_rounded(self, pool: Reader, byte_offset: int, target: memoryview) -> int | None:
        """Fill ``target`` with the values in bfloat16; see `derived.Rounding`.

        Raises:
            CorruptError, ReshardError: as in `read_into`.
        """
        first, skipped = divmod(byte_offset, self.tile_nbytes)
        size = self.tile_nbytes // _SIZE * BFLOAT16.itemsize
        ends = len(target) % size == 0 or byte_offset + 2 * len(target) == self.nbytes
        if skipped or not ends or self.product.magnitude is not None:
            return None  # part of a tile is computed once, for this read and the next
        reader, overflowed = find_reader(pool), 0
        for start in range(0, len(target), size):
            part = target[start : start + size]
            overflowed += self._compute(first + start // size, reader, part, BFLOAT16)
        return overflowed

    def compute(self, number: int, reader: TileReader, into: memoryview) -> None:
        """Fill ``into`` with some rows of the merged weight.

        Raises:
            CorruptError: a value of the result is infinite or not a number.
        """
        self._compute(number, reader, into, FLOAT32)

    def _compute(self, number: int, reader: TileReader, into: memoryview, dtype: DType) -> int:
        """Fill ``into`` with a tile in a dtype; return how many finite values became infinite."""
        import numpy as np

        product, first = self.product, number * self.tile_rows
        shape = min(self.tile_rows, self.shape[0] - first), self.columns
        terms = reader.keep("terms", shape, lambda: np.empty((2, *shape), "<f4"))
        rows = slice(first, first + shape[0])
        self._read_base(reader, first, terms[0])
        left, right = reader.keep("factors", self, lambda: self._load(reader))
        overflowed = add_matrix_product(terms, self.dtype, left[rows], right, into, dtype)
        if product.magnitude is not None:
            tile = np.frombuffer(into, "<f4").reshape(shape)
            set_row_lengths(tile, _read(reader, product.magnitude).reshape(-1)[rows], terms[1])
            overflowed = 0 if np.isfinite(tile).all() else None
        if overflowed is None:
            raise CorruptError(
                product.layer,
                f"{self.base.fqn!r} has infinite values or NaN after the adapter is added",
                "the adapter has diverged or is damaged: use an earlier checkpoint of it",
            )
        return overflowed

    def _read_base(self, reader: TileReader, first: int, tile: Array) -> None:
        """Read rows of the base into the end of a tile."""
        rest = self.shape[1:]
        origin = (*self.lead, first, *(0 for _ in rest))
        box = Box(origin, (*(1 for _ in self.lead), len(tile), *rest))
        nbytes = box.volume * self.dtype.itemsize
        reader.read(self.base, box, self.dtype, tile.data.cast("B")[-nbytes:])

    def _load(self, reader: TileReader) -> tuple[Array, Array]:
        """Return the factors of this matrix: (rows, rank), which is scaled, and (rank, columns)."""
        import numpy as np

        product, experts = self.product, self.product.experts
        b = reader.keep("b", product.b, lambda: _read(reader, product.b))
        b = b.reshape(product.b.shape[0], -1)
        if product.a is None:  # a bias
            return b * np.float32(product.scale), np.ones((1, 1), "<f4")
        rank = product.a.shape[0] // experts
        expert = self.lead[0] if experts > 1 else 0
        a = _read(reader, product.a, expert * rank, rank).reshape(rank, -1)
        if product.singular is not None:
            a = a * _read(reader, product.singular)
        b = b[:, expert::experts]
        left, right = (b, a) if product.order == "out_in" else (a.T, b.T)
        return left * np.float32(product.scale), np.ascontiguousarray(right)


def _choose_tile_rows(rows: int, columns: int) -> int:
    """Return the rows of a tile; where possible, all tiles have the same number of rows."""
    tiles = max(-(-rows * columns // _TILE), 1)
    equal = next((n for n in range(tiles, min(2 * tiles, rows) + 1) if rows % n == 0), tiles)
    return max(-(-rows // equal), 1)


def _read(reader: TileReader, entry: Entry, first: int = 0, rows: int | None = None) -> Array:
    """Return a tensor in fp32, or some of its rows."""
    import numpy as np

    box = whole(entry.shape)
    if rows is not None:
        box = Box((first, *box.origin[1:]), (rows, *entry.shape[1:]))
    values = np.empty(box.shape, "<f4")
    reader.read(entry, box, FLOAT32, values.reshape(-1).data.cast("B"))
    return values


def add_matrix_product(
    terms: Array, dtype: DType, left: Array, right: Array, into: memoryview, sum_dtype: DType
) -> int | None:
    """Write the sum of a matrix and ``left @ right``, in float32 and then rounded.

    Args:
        terms: float32 memory for the matrix, whose values are at its end, and for the product.
        dtype: the dtype of the values of the matrix.
        left: the left factor.
        right: the right factor.
        into: the bytes to write.
        sum_dtype: the dtype to write, float32 or bfloat16.

    Returns:
        How many finite sums became infinite when they were rounded; None if a sum is not finite.
    """
    (base, work), overflowed = terms, None
    memory, depth = base.data.cast("B"), left.shape[1]
    for start in range(0, depth, _DEPTH):
        _multiply(left[:, start : start + _DEPTH], right[start : start + _DEPTH], work)
        values = memory[base.nbytes - base.size * dtype.itemsize :]
        is_last = start + _DEPTH >= depth
        sums, made = (into, sum_dtype) if is_last else (memory, FLOAT32)
        overflowed = add(values, dtype, work.data.cast("B"), sums, made)
        dtype = FLOAT32
    return overflowed


def _multiply(left: Array, right: Array, into: Array) -> None:
    """Write ``left @ right`` into ``into`` by matrix products of a fixed size."""
    width = _MULTIPLICATIONS // (_HEIGHT * _round_up(left.shape[1]))
    for rows, height in _cut(left.shape[0], _HEIGHT):
        for columns, across in _cut(right.shape[1], width):
            _multiply_blocks(left[rows], right[:, columns], into[rows, columns], height, across)


def _multiply_blocks(left: Array, right: Array, into: Array, height: int, width: int) -> None:
    """Multiply block by block; ``height`` and ``width`` divide the shape."""
    import numpy as np

    (rows, depth), columns = left.shape, right.shape[1]
    down, across = rows // height, columns // width
    np.matmul(
        left.reshape(down, 1, height, depth),
        right.reshape(depth, across, width).transpose(1, 0, 2)[None],
        out=into.reshape(down, height, across, width).transpose(0, 2, 1, 3),
    )


def _cut(extent: int, step: int) -> list[tuple[slice, int]]:
    """Return the part of an extent that ``step`` divides, and the rest, each with its step."""
    even = extent - extent % step
    parts = [(slice(0, even), step), (slice(even, extent), extent - even)]
    return [part for part in parts if part[0].start < part[0].stop]


def _round_up(number: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def set_row_lengths(rows: Array, lengths: Array, work: Array) -> None:
    """Scale every row to a length; ``work`` has the shape of the rows."""
    import numpy as np

    np.multiply(rows, rows, out=work)
    norms = np.sqrt(work.sum(axis=1, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):  # `compute` refuses the result
        rows *= (lengths / norms).astype("<f4")[:, None]
