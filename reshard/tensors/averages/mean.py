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

from reshard.core.computed import ComputedValues
from reshard.core.dtypes import FLOAT16, FLOAT32, FLOAT64, DType
from reshard.core.manifest import Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.engine.planning.copies import CopyPlanner
from reshard.errors import CorruptError
from reshard.system.derived import Reader
from reshard.tensors.averages import sums

_BLOCK_NBYTES = 1 << 21  # values of all checkpoints; after shorter reads, threads wait for the GIL
_LEAST = 1 << 14  # elements; with shorter blocks, calls dominate


def _count_block_elements(column_nbytes: int) -> int:
    """``column_nbytes`` is the size of one element of every checkpoint together."""
    return max(_BLOCK_NBYTES // column_nbytes // _LEAST, 1) * _LEAST


def count_worker_nbytes(count: int) -> int:
    """Return the memory that a thread needs at most for the means of a number of tensors, in bytes.

    With numpy, there are also sums and products.
    """
    computed = 2 * _count_block_elements(count * FLOAT16.itemsize) * FLOAT64.itemsize
    return max(_BLOCK_NBYTES, _LEAST * count * FLOAT64.itemsize) + computed


@dataclass(frozen=True, eq=False)
class Mean(ComputedValues):
    """The mean of one tensor.

    Args:
        sources: the tensor of every checkpoint, in the order of the sum.
        weights: the factor of each; None: all count the same.
        where: the checkpoints, for messages and for the name of the bytes.
    """

    weights: tuple[float, ...] | None
    where: tuple[str, ...]

    @cached_property
    def dtype(self) -> DType:
        """The dtype of the mean."""
        is_double = any(FLOAT64 in entry.layout.dtypes for entry in self.sources)
        return FLOAT64 if is_double else FLOAT32

    @property
    def detail(self) -> str:
        """The tensor, the checkpoints and their weights."""
        return f"mean of {self.sources[0].fqn} of {self.where} by {self.weights}"

    @cached_property
    def _rows(self) -> list[tuple[CopyPlanner, DType]]:
        return [(CopyPlanner(entry), _find_stored(entry) or self.dtype) for entry in self.sources]

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
            self.sources[0].fqn,
            f"the mean is infinite or NaN (first at element {at}): one of {', '.join(self.where)}"
            " contains such a value, or their difference is too large",
            "check each checkpoint with `reshard verify --deep`, and leave out the one that"
            " diverged; for a tensor that is not trained, pass --exclude REGEX",
        )


def _find_stored(entry: Entry) -> DType | None:
    # A value that has a factor is not stored itself.
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
    return replace(tensors[-1], dtype=mean.dtype, chunks=mean.chunks)
