"""The weighted mean of one tensor of several checkpoints, as bytes that are computed when read.

The arithmetic, for each element by itself:

- without weights: the values, in float64, are added one checkpoint after the other, and the sum is
  divided by the number of checkpoints;
- with weights: each value is multiplied by its weight in float64, and the products are added one
  checkpoint after the other.

The result is rounded to float32 (it stays float64 if a checkpoint stores float64). A weight that is
written in 16 bits is then rounded a second time, as `merge` rounds an fp32 master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from reshard.core.box import row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import FLOAT16, FLOAT32, FLOAT64, DType
from reshard.core.manifest import Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.engine.planning.copies import CopyPlanner
from reshard.errors import CorruptError
from reshard.system.derived import Derived, Reader, list_files
from reshard.tensors.averages import sums

_BLOCK_NBYTES = 1 << 21  # values of all checkpoints; after shorter reads, threads wait for the GIL
_LEAST = 1 << 14  # elements; with shorter blocks, calls dominate


def _count_block_elements(column_nbytes: int) -> int:
    """Return the number of elements that are averaged at a time.

    Args:
        column_nbytes: the size of one element of every checkpoint together, in bytes.
    """
    return max(_BLOCK_NBYTES // column_nbytes // _LEAST, 1) * _LEAST


def count_worker_nbytes(count: int) -> int:
    """Return the memory that a thread needs at most for the means of a number of tensors, in bytes.

    With numpy, there are also sums and products.
    """
    computed = 2 * _count_block_elements(count * FLOAT16.itemsize) * FLOAT64.itemsize
    return max(_BLOCK_NBYTES, _LEAST * count * FLOAT64.itemsize) + computed


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of one tensor, row-major; it implements `derived.Computation`.

    Args:
        tensors: the tensor of every checkpoint, in the order of the sum.
        weights: the factor of each; None: all count the same.
        where: the checkpoints, for messages and for the name of the bytes.
    """

    tensors: tuple[Entry, ...]
    weights: tuple[float, ...] | None
    where: tuple[str, ...]

    @cached_property
    def dtype(self) -> DType:
        """The dtype of the mean."""
        is_double = any(FLOAT64 in entry.layout.dtypes for entry in self.tensors)
        return FLOAT64 if is_double else FLOAT32

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.tensors[0].numel * self.dtype.itemsize

    @property
    def tile_nbytes(self) -> int:
        """The size of one element: any range of elements is computed by itself."""
        return self.dtype.itemsize

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store the tensor in all checkpoints."""
        names = (file for entry in self.tensors for file in entry.layout.file_table[1])
        return tuple(dict.fromkeys(path for file in names for path in list_files(file)))

    @property
    def name(self) -> Derived:
        """The name under which the values can be read."""
        # Equal names mean equal bytes (`Derived`), so the name states the
        # checkpoints and their weights.
        fqn, first = self.tensors[0].fqn, self.files[0]
        return Derived(first, f"mean of {fqn} of {self.where} by {self.weights}", self)

    @cached_property
    def _rows(self) -> list[tuple[CopyPlanner, DType]]:
        """The planner of each tensor, and the dtype in which its values are read."""
        return [(CopyPlanner(entry), _find_stored(entry) or self.dtype) for entry in self.tensors]

    @cached_property
    def _column_nbytes(self) -> int:
        return sum(dtype.itemsize for _, dtype in self._rows)

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the means from a byte offset on.

        Raises:
            CorruptError: a mean is infinite or not a number.
            ReshardError: a file cannot be read.
        """
        size, step = self.dtype.itemsize, _count_block_elements(self._column_nbytes)
        reader, first = find_reader(pool), byte_offset // size
        for start in range(0, len(target) // size, step):
            block = target[start * size : (start + step) * size]
            if not self._compute(reader, first + start, block):
                self._refuse_block(first + start, block)

    def _compute(self, reader: TileReader, first: int, out: memoryview) -> bool:
        """Write the means of the elements from ``first`` on, and return whether all are finite."""
        numel = len(out) // self.dtype.itemsize
        most = max(_BLOCK_NBYTES, _LEAST * self._column_nbytes)
        kept = memoryview(reader.keep("values of means", most, lambda: bytearray(most)))
        values = kept[: numel * self._column_nbytes]
        at = 0
        for planner, dtype in self._rows:
            row = values[at : at + numel * dtype.itemsize]
            reader.read_run(planner, first, first + numel, dtype, row)
            at += len(row)
        # The weights have the sum 1 already.
        factors = self.weights or (1.0,) * len(self._rows)
        divisor = 1.0 if self.weights else len(self._rows)
        dtypes = [dtype for _, dtype in self._rows]
        return sums.average(values, dtypes, factors, divisor, self.dtype, out)

    def _refuse_block(self, first: int, block: memoryview) -> None:
        means = block.cast("f" if self.dtype == FLOAT32 else "d")
        at = first + next(number for number, mean in enumerate(means) if not isfinite(mean))
        raise CorruptError(
            self.tensors[0].fqn,
            f"the mean is infinite or NaN (first at element {at}): one of {', '.join(self.where)}"
            " contains such a value, or their difference is too large",
            "check each checkpoint with `reshard verify --deep`, and leave out the one that"
            " diverged; for a tensor that is not trained, pass --exclude REGEX",
        )


def _find_stored(entry: Entry) -> DType | None:
    """Return the dtype in which the files store all values of a tensor, or None.

    A value that has a factor is not stored itself.
    """
    dtypes = entry.layout.dtypes
    is_stored = entry.layout.is_partition or all(chunk.factor == 1.0 for chunk in entry.chunks)
    return next(iter(dtypes)) if is_stored and len(dtypes) == 1 else None


def compute_mean(
    tensors: Sequence[Entry], weights: Sequence[float] | None, where: Sequence[str]
) -> Entry:
    """Return a tensor with the mean of the values of several tensors of one shape.

    Args:
        tensors: in the order of the sum. The result has the name and kind of the last one.
        weights: the factor of each; None: all count the same.
        where: the checkpoints that they are from.
    """
    mean = Mean(tuple(tensors), tuple(weights) if weights else None, tuple(where))
    last, dtype = tensors[-1], mean.dtype
    strides = row_major(last.shape, dtype.itemsize)
    chunks = (Chunk(whole(last.shape), mean.name, 0, strides, dtype),) if last.numel else ()
    return replace(last, dtype=dtype, chunks=chunks)
