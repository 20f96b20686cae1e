"""Weights with a LoRA product added: ``W + scale * left @ right``, computed tile by tile in fp32.

A tile is a block of whole rows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from reshard.core.box import Box, Index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.computed import list_source_files
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.core.manifest import Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.errors import CorruptError
from reshard.system.derived import Derived, Reader
from reshard.tensors.adapters.arithmetic import add_product, set_row_lengths

Order = Literal["out_in", "in_out"]
"""The order of the last dims of a weight: (out, in) as in nn.Linear, (in, out) as in Conv1D."""

_TILE = 1 << 19  # elements; a window of 4 MiB holds two tiles
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
        factors = 2 * sum(entry.numel for entry in read if entry)  # as stored, and transposed
        # The base, a tile that is read in parts, and the squares of DoRA.
        return _SIZE * (factors + 3 * _TILE)


def merge_product(base: Entry, product: Product) -> Entry:
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
    return contiguous(file, 0, FLOAT32, box)


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
    def expert(self) -> int:
        """The index of the expert in the first dim; 0 for a tensor without experts."""
        return self.lead[0] if self.lead else 0

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
        return list_source_files(
            (self.base, product.a, product.b, product.magnitude, product.singular)
        )

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
        product, first = self.product, number * self.tile_rows
        rows = min(self.tile_rows, self.shape[0] - first)
        base = self._read_base(reader, first, rows)
        left, right, rank = reader.keep("factors", self, lambda: self._load(reader))
        width = rank * _SIZE
        left = left[first * width : (first + rows) * width]
        overflowed = add_product(base, self.dtype, left, right, rank, product.scale, into, dtype)
        if overflowed is not None and product.magnitude is not None:
            overflowed = self._set_lengths(reader, product.magnitude, first, rows, into)
        if overflowed is None:
            raise CorruptError(
                product.layer,
                f"{self.base.fqn!r} has infinite values or NaN after the adapter is added",
                "the adapter has diverged or is damaged: use an earlier checkpoint of it",
            )
        return overflowed

    def _read_base(self, reader: TileReader, first: int, rows: int) -> memoryview:
        """Return rows of the base, in memory that the next tile uses again."""
        most = self.tile_rows * self.columns * self.dtype.itemsize
        memory = memoryview(reader.keep("base", most, lambda: bytearray(most)))
        start = (self.expert * self.shape[0] + first) * self.columns
        stop = start + rows * self.columns
        memory = memory[: (stop - start) * self.dtype.itemsize]
        reader.read_elements(self.base, start, stop, self.dtype, memory)
        return memory

    def _set_lengths(
        self, reader: TileReader, magnitude: Entry, first: int, rows: int, tile: memoryview
    ) -> int | None:
        import numpy as np

        lengths = np.frombuffer(_read(reader, magnitude), "<f4")[first : first + rows]
        values = np.frombuffer(tile, "<f4").reshape(rows, self.columns)
        return 0 if set_row_lengths(values, lengths) else None

    def _load(self, reader: TileReader) -> tuple[memoryview, memoryview, int]:
        """Return the factors of this matrix, (rows, rank) and (rank, columns), and their rank."""
        product, experts = self.product, self.product.experts
        b = reader.keep("b", product.b, lambda: _read(reader, product.b))
        if product.a is None:  # a bias
            return b, memoryview(array("f", [1])).cast("B"), 1
        rank = product.a.shape[0] // experts
        a = _read(reader, product.a, self.expert * rank, rank)
        if experts == 1 and product.order == "out_in" and product.singular is None:
            return b, a, rank
        import numpy as np

        right = np.frombuffer(a, "<f4").reshape(rank, -1)
        if product.singular is not None:
            right = right * np.frombuffer(_read(reader, product.singular), "<f4")[:, None]
        left = np.frombuffer(b, "<f4").reshape(-1, rank, experts)[..., self.expert]
        if product.order == "in_out":
            left, right = right.T, left.T
        return memoryview(left.tobytes()), memoryview(right.tobytes()), rank


def _choose_tile_rows(rows: int, columns: int) -> int:
    tiles = max(-(-rows * columns // _TILE), 1)
    equal = next((n for n in range(tiles, min(2 * tiles, rows) + 1) if rows % n == 0), tiles)
    return max(-(-rows // equal), 1)


def _read(reader: TileReader, entry: Entry, first: int = 0, rows: int | None = None) -> memoryview:
    box = whole(entry.shape)
    if rows is not None:
        box = Box((first, *box.origin[1:]), (rows, *entry.shape[1:]))
    values = memoryview(bytearray(box.volume * _SIZE))
    reader.read(entry, box, FLOAT32, values)
    return values
