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
from reshard.core.dtypes import FLOAT32, FLOAT64, DType
from reshard.core.manifest import Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.engine.planning.copies import CopyPlanner
from reshard.errors import CorruptError
from reshard.system.derived import Derived, Reader, list_files
from reshard.tensors.averages import sums

_BLOCK_NBYTES = 1 << 20  # values of all checkpoints that a core's cache holds
_LEAST = 1 << 14  # elements; with shorter blocks, calls dominate


def _count_block_elements(count: int) -> int:
    """Return the number of elements that are averaged at a time."""
    return max(_BLOCK_NBYTES // FLOAT32.itemsize // count // _LEAST, 1) * _LEAST


def count_worker_nbytes(count: int) -> int:
    """Return the memory that a thread needs for the means of a number of tensors, in bytes.

    With numpy, there are also sums and products.
    """
    return _count_block_elements(count) * FLOAT64.itemsize * (count + 2)


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
    def _planners(self) -> list[CopyPlanner]:
        return [CopyPlanner(entry) for entry in self.tensors]

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the means from a byte offset on.

        Raises:
            CorruptError: a mean is infinite or not a number.
            ReshardError: a file cannot be read.
        """
        size, step = self.dtype.itemsize, _count_block_elements(len(self.tensors))
        reader, first = find_reader(pool), byte_offset // size
        for start in range(0, len(target) // size, step):
            block = target[start * size : (start + step) * size]
            if not self._compute(reader, first + start, block):
                self._refuse_block(first + start, block)

    def _compute(self, reader: TileReader, first: int, out: memoryview) -> bool:
        """Write the means of the elements from ``first`` on, and return whether all are finite."""
        count, nbytes = len(self.tensors), len(out)
        stop = first + nbytes // self.dtype.itemsize
        most = _count_block_elements(count) * self.dtype.itemsize * count
        values = memoryview(reader.keep("values of means", most, lambda: bytearray(most)))
        rows = values[: nbytes * count]
        for number, planner in enumerate(self._planners):
            row = rows[number * nbytes : (number + 1) * nbytes]
            reader.read_run(planner, first, stop, self.dtype, row)
        # The weights have the sum 1 already.
        factors = self.weights or (1.0,) * count
        divisor = 1.0 if self.weights else count
        return sums.average(rows, factors, divisor, self.dtype, out)

    def _refuse_block(self, first: int, block: memoryview) -> None:
        """Raise the error of a block in which a mean is infinite or not a number."""
        means = block.cast("f" if self.dtype == FLOAT32 else "d")
        at = first + next(number for number, mean in enumerate(means) if not isfinite(mean))
        raise CorruptError(
            self.tensors[0].fqn,
            f"the mean is infinite or NaN (first at element {at}): one of {', '.join(self.where)}"
            " contains such a value, or their difference is too large",
            "check each checkpoint with `reshard verify --deep`, and leave out the one that"
            " diverged; for a tensor that is not trained, pass --exclude REGEX",
        )


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
