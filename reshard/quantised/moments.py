"""Optimizer state that torchao stores as 8- or 4-bit codes with a scale for each block.

The value of an element is the code's value times the scale of its block, in float32, which is what
torchao's optimizers compute with. A code stands for a value of a table stored beside the codes, or
is a float8 number. Blocks are equal parts of the flattened tensor.

Source: torchao 0.4 to 0.18, ``optim/subclass_8bit.py``, ``subclass_4bit.py``, ``subclass_fp8.py``
(before 0.9 in ``prototype/low_bit_optim``): ``dequantize``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.containers.torch_objects import Tensor, is_wrapped
from reshard.core.box import as_index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import E4M3, FLOAT32, UINT8, DType
from reshard.core.manifest import Entry
from reshard.errors import ALTERED, CorruptError
from reshard.system.derived import Derived, Reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_MODULES = ("torchao.optim.", "torchao.prototype.low_bit_optim.")
_BITS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}
_BLOCK = 1 << 17  # elements; what is computed at a time stays in a core's cache


@dataclass(frozen=True, slots=True)
class Moment:
    """The values of one stored tensor; implements `derived.Computation`.

    Args:
        numel: the number of values.
        bits: the size of a code. Of two codes of 4 bits in a byte, the upper ones come first.
        codes: the codes, one after the other.
        scales: the scale of each block, in float32.
        table: the value of each code, in float32; None for codes that are float8 numbers.
    """

    numel: int
    bits: int
    codes: Chunk
    scales: Chunk
    table: Chunk | None

    @property
    def nbytes(self) -> int:
        """The size of the values in float32."""
        return self.numel * FLOAT32.itemsize

    @property
    def block(self) -> int:
        """The number of values of a block."""
        return self.numel // self.scales.box.volume

    @property
    def files(self) -> tuple[str, ...]:
        """The file that stores the codes and the scales."""
        return (self.codes.file,)

    @property
    def tile_nbytes(self) -> int:
        """The size of one element: any range of elements is computed by itself."""
        return FLOAT32.itemsize

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on.

        Raises:
            ReshardError: the file cannot be read.
        """
        import numpy as np

        out = np.frombuffer(target, "<f4")
        first = byte_offset // FLOAT32.itemsize
        table = self._read_table(pool)
        size = self.block
        for start in range(first, first + len(out), _BLOCK):
            stop = min(start + _BLOCK, first + len(out))
            block, at = out[start - first : stop - first], start // size
            scales = _read(pool, self.scales, at, (stop - 1) // size + 1, "<f4")
            np.take(table, self._read_codes(pool, start, stop), out=block)
            with np.errstate(over="ignore", invalid="ignore"):
                block *= np.repeat(scales, size)[start - at * size :][: len(block)]

    def _read_table(self, pool: Reader) -> Array:
        """Return the value of each code."""
        if self.table is None:
            from reshard.quantised.decode import decode_table

            return decode_table(self.codes.dtype)
        return _read(pool, self.table, 0, 1 << self.bits, "<f4")

    def _read_codes(self, pool: Reader, start: int, stop: int) -> Array:
        """Return the codes of some elements, each in a byte."""
        import numpy as np

        if self.bits == UINT8.itemsize * 8:
            return _read(pool, self.codes, start, stop, "<u1")
        stored = _read(pool, self.codes, start // 2, (stop + 1) // 2, "<u1")
        pairs = np.stack([stored >> 4, stored & 0b1111], axis=1).reshape(-1)
        return pairs[start % 2 :][: stop - start]


def _read(pool: Reader, chunk: Chunk, start: int, stop: int, dtype: str) -> Array:
    import numpy as np

    size = chunk.dtype.itemsize
    raw = pool.read(chunk.file, chunk.byte_offset + start * size, (stop - start) * size)
    return np.frombuffer(raw, dtype)


def describe(tensor: Any) -> Chunk | None:
    """Return the values of a tensor of torchao's optimizers; None for anything else.

    Raises:
        CorruptError: its parts do not fit together.
    """
    if not is_wrapped(tensor) or not tensor.name.startswith(_MODULES):
        return None
    bits = _BITS.get(tensor.name.rpartition(".")[2])
    codes, scales, table = map(tensor.get, ("codes", "scale", "qmap"))
    if bits is None or not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
        return None
    try:
        shape = as_index(tensor.args[2])
    except (IndexError, TypeError, ValueError):
        return None
    is_float8 = codes.dtype == E4M3
    if not is_float8 and (codes.dtype != UINT8 or not isinstance(table, Tensor)):
        return None
    numel, tables = prod(shape), [] if is_float8 else [table]
    if (
        codes.numel * 8 != numel * bits
        or not scales.numel
        or numel % scales.numel
        or any(each.numel != 1 << bits for each in tables)
        or any(each.dtype != FLOAT32 for each in (scales, *tables))
        or not all(each.chunk.is_dense for each in (codes, scales, *tables))
    ):
        raise CorruptError(
            codes.storage.file,
            f"contains a {tensor.name} of {shape} with {codes.dtype} codes of {codes.shape} and"
            f" {scales.dtype} scales of {scales.shape}, which do not fit together",
            ALTERED,
        )
    values = Moment(numel, bits, codes.chunk, scales.chunk, None if is_float8 else table.chunk)
    name = Derived(
        codes.chunk.file, f"values of the codes at byte {codes.chunk.byte_offset}", values
    )
    return contiguous(name, 0, FLOAT32, whole(shape))


def _find_moment(chunk: Chunk) -> Moment | None:
    computation = chunk.file.computation if isinstance(chunk.file, Derived) else None
    return computation if isinstance(computation, Moment) else None


def has_codes(chunks: Iterable[Chunk]) -> bool:
    """Return whether values of some chunks are computed from codes."""
    return any(map(_find_moment, chunks))


def is_decoded(entry: Entry) -> bool:
    """Return whether some values of an entry are computed from codes."""
    return not entry.layout.is_partition and has_codes(entry.chunks)


def find_stored(chunk: Chunk) -> Chunk:
    """Return where the codes of a chunk are stored; the chunk itself if it has none."""
    moment = _find_moment(chunk)
    return chunk if moment is None else moment.codes


def cuts_blocks(entry: Entry, rows: Iterable[int]) -> bool:
    """Return whether a cut before one of some rows would divide a block of codes."""
    return any(
        (row - chunk.box.origin[0]) * prod(entry.shape[1:]) % moment.block
        for row in rows
        for chunk in entry.chunks
        if 0 < row - chunk.box.origin[0] < chunk.box.shape[0] and (moment := _find_moment(chunk))
    )


def choose_dtype(chunks: Iterable[Chunk], stated: DType) -> DType:
    """Return the dtype of a tensor: float32 if some of its values are computed from codes."""
    return FLOAT32 if has_codes(chunks) else stated
