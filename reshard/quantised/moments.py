"""Optimizer state that torchao or bitsandbytes stores as codes with a scale for each block.

The value of an element is the code's value times the scale of its block, in float32, which is what
the optimizers compute with. A code of 8 or 4 bits stands for a value of a table stored beside the
codes, or is a float8 number. Blocks are equal parts of the flattened tensor; bitsandbytes' last one
may be shorter.

Sources: torchao 0.4 to 0.18, ``optim/subclass_8bit.py``, ``subclass_4bit.py``, ``subclass_fp8.py``
(before 0.9 in ``prototype/low_bit_optim``): ``dequantize``; bitsandbytes 0.50
``optim/optimizer.py`` (``Optimizer1State``, ``Optimizer2State``), ``functional.py``
(``dequantize_blockwise``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.containers.torch_objects import StoredBuffer, Tensor, is_wrapped
from reshard.core.box import Box, Index, as_index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import E4M3, FLOAT32, UINT8, DType
from reshard.core.manifest import Entry
from reshard.errors import ALTERED, CorruptError
from reshard.layouts.partition import require_dense
from reshard.quantised import BITSANDBYTES
from reshard.system.derived import Derived, Reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_MODULES = ("torchao.optim.", "torchao.prototype.low_bit_optim.")
_BITS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}
_PARTS = ("state", "absmax", "qmap")  # the codes of a slot, their scales and their table
_BLOCKS = (256, 2048)  # elements of a block; 2048 in bitsandbytes before 0.44
_BLOCK = 1 << 17  # elements; what is computed at a time stays in a core's cache


class Moment(NamedTuple):
    """The values of one stored tensor; implements `derived.Computation`.

    Args:
        numel: the number of values.
        bits: the size of a code. Of two codes of 4 bits in a byte, the upper ones come first.
        block: the number of values of a block.
        codes: the codes, one after the other.
        scales: the scale of each block, in float32.
        table: the value of each code, in float32; None for codes that are float8 numbers.
        first: the element of the scaled tensor to which the first code belongs.
    """

    numel: int
    bits: int
    block: int
    codes: Chunk
    scales: Chunk
    table: Chunk | None
    first: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the values in float32."""
        return self.numel * FLOAT32.itemsize

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store the codes, the scales and the table."""
        stored = filter(None, (self.codes, self.scales, self.table))
        return tuple(dict.fromkeys(chunk.file for chunk in stored))

    @property
    def tile_nbytes(self) -> int:
        """The size of one element: any range of elements is computed by itself."""
        return FLOAT32.itemsize

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on."""
        import numpy as np

        out = np.frombuffer(target, "<f4")
        first = byte_offset // FLOAT32.itemsize
        table = self._read_table(pool)
        size = self.block
        for start in range(first, first + len(out), _BLOCK):
            stop = min(start + _BLOCK, first + len(out))
            block = out[start - first : stop - first]
            np.take(table, self._read_codes(pool, start, stop), out=block)
            begin, end = start + self.first, stop + self.first  # as the scales count
            at = begin // size
            scales = _read(pool, self.scales, at, (end - 1) // size + 1, "<f4")
            with np.errstate(over="ignore", invalid="ignore"):
                block *= np.repeat(scales, size)[begin - at * size :][: len(block)]

    def _read_table(self, pool: Reader) -> Array:
        if self.table is None:
            from reshard.quantised.decode import decode_table

            return decode_table(self.codes.dtype.name)
        return _read(pool, self.table, 0, 1 << self.bits, "<f4")

    def _read_codes(self, pool: Reader, start: int, stop: int) -> Array:
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
        or any(table.numel != 1 << bits for table in tables)
        or any(tensor.dtype != FLOAT32 for tensor in (scales, *tables))
    ):
        raise CorruptError(
            codes.storage.file,
            f"contains a {tensor.name} of {shape} with {codes.dtype} codes of {codes.shape} and"
            f" {scales.dtype} scales of {scales.shape}, which do not fit together",
            ALTERED,
        )
    for part in (codes, scales, *tables):
        require_dense(part.chunk)
    held = (codes.chunk, scales.chunk, None if is_float8 else table.chunk)
    return _name_values(Moment(numel, bits, numel // scales.numel, *held), whole(shape))


def _name_values(values: Moment, box: Box) -> Chunk:
    codes = values.codes
    name = Derived(codes.file, f"values of the codes at byte {codes.byte_offset}", values)
    return contiguous(name, 0, FLOAT32, box)


def decode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with values for the codes that bitsandbytes keeps in it.

    Args:
        state: by name; names of nested dicts are joined (`nested_slots.flatten`).
    """
    decoded = dict(state)
    for names in _list_coded(state):
        codes, scales, table = (state[name] for name in names)
        if not all(isinstance(part, Tensor) for part in (codes, scales, table)):
            continue
        values = _describe_blocks(codes.chunk, scales.chunk, table.chunk, codes.shape)
        if values is None:
            continue
        size = codes.numel * FLOAT32.itemsize
        storage = StoredBuffer(values.file, codes.storage.key, FLOAT32, size, 0)
        strides = tuple(stride // FLOAT32.itemsize for stride in values.byte_strides)
        decoded[names[0]] = Tensor(storage, 0, codes.shape, strides, FLOAT32)
        for name in names[1:]:
            del decoded[name]
    return decoded


def decode_entries(entries: Iterable[Entry]) -> tuple[list[Entry], int]:
    """Return entries with values for the codes of bitsandbytes, and the number of such entries."""
    slots: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        slots.setdefault(entry.fqn, {})[entry.kind] = entry
    count = 0
    for own in slots.values():
        for names in _list_coded(own):
            codes, scales, table = (own[name] for name in names)
            if any(part.layout.is_partition for part in (codes, scales, table)):
                continue
            if not _is_whole(scales) or not _is_whole(table):
                continue
            values = [
                _describe_blocks(chunk, scales.chunks[0], table.chunks[0], codes.shape)
                for chunk in codes.chunks
            ]
            chunks = tuple(chunk for chunk in values if chunk is not None)
            if chunks and len(chunks) == len(values):
                own[names[0]] = replace(codes, dtype=FLOAT32, chunks=chunks)
                for name in names[1:]:
                    del own[name]
                count += 1
    return [entry for own in slots.values() for entry in own.values()], count


def _list_coded(state: Mapping[str, Any]) -> Iterator[list[str]]:
    for prefix in (BITSANDBYTES, ""):
        for number in (1, 2):
            names = [f"{prefix}{part}{number}" for part in _PARTS]
            if all(name in state for name in names):
                yield names


def _is_whole(entry: Entry) -> bool:
    return bool(entry.chunks) and entry.chunks[0].box == whole(entry.shape)


def _describe_blocks(codes: Chunk, scales: Chunk, table: Chunk, shape: Index) -> Chunk | None:
    # Not described: two moments of AdEMAMix, which bitsandbytes stacks in one tensor with a row of
    # scales for each, and codes that are not whole rows of the tensor (of ``shape``).
    are_rows = codes.box.shape[1:] == shape[1:]
    if codes.dtype != UINT8 or len(scales.box.shape) != 1 or not are_rows:
        return None
    numel, blocks = prod(shape), scales.box.volume
    sizes = [size for size in _BLOCKS if -(-numel // size) == blocks]
    if (
        not sizes
        or table.box.volume != 1 << UINT8.itemsize * 8
        or any(part.dtype != FLOAT32 for part in (scales, table))
    ):
        raise CorruptError(
            codes.file,
            f"contains {numel} codes of bitsandbytes, {scales.dtype} scales of {blocks} blocks and"
            f" a {table.dtype} table of {table.box.volume} values, which do not fit together",
            ALTERED,
        )
    first = codes.box.origin[0] * prod(shape[1:]) if shape else 0
    held = (require_dense(codes), require_dense(scales), require_dense(table))
    return _name_values(Moment(codes.box.volume, 8, sizes[0], *held, first), codes.box)


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


def describe_decoded(what: str, library: str) -> str:
    """Return a note on optimizer state that is read as the values of its codes."""
    return (
        f"{what} is stored in codes of 8 or 4 bits ({library}): its values are computed in float32"
    )


def choose_dtype(chunks: Iterable[Chunk], stated: DType) -> DType:
    """Return the dtype of a tensor: float32 if some of its values are computed from codes."""
    return FLOAT32 if has_codes(chunks) else stated
