"""A quantised weight: its stored tensors, and its values, which no file stores."""

from __future__ import annotations

from typing import NamedTuple

from reshard.core.box import Index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.manifest import Entry
from reshard.quantised.scaled import Scaled
from reshard.system.derived import Derived, Reader


class WeightValues(NamedTuple):
    """The values of a quantised weight, row-major; it implements `derived.Computation`."""

    weight: Scaled

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        return self.weight.numel * self.weight.dtype.itemsize

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store codes and scales."""
        read = (self.weight.codes, self.weight.scales, self.weight.zeros)
        return tuple(dict.fromkeys(chunk.file for chunk in read if chunk))

    @property
    def tile_nbytes(self) -> int:
        """The size of a row of blocks, which share scales, or of a transposed matrix."""
        weight = self.weight
        if weight.transposed:
            return weight.rows * weight.columns * weight.dtype.itemsize
        return weight.columns * weight.block[0] * weight.dtype.itemsize

    @property
    def name(self) -> Derived:
        """The name under which the values can be read."""
        codes = self.weight.codes
        return Derived(codes.file, f"values of {self.weight.fqn} at {codes.byte_offset}", self)

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on."""
        from reshard.quantised import decode  # imports numpy

        decode.read_values(pool, self.weight, byte_offset // self.weight.dtype.itemsize, target)

    def read_rounded(self, pool: Reader, byte_offset: int, target: memoryview) -> int | None:
        """Fill ``target`` with the values in bfloat16; see `derived.Rounding`."""
        from reshard.quantised import decode  # imports numpy

        start = byte_offset // self.weight.dtype.itemsize
        return decode.read_rounded(pool, self.weight, start, target)


class QuantisedPair(NamedTuple):
    """A quantised weight: its codes and scales, and how they belong together.

    Args:
        fqn: the name of the weight.
        shape: the shape of the weight.
        others: further stored tensors of the weight, as a scale of its scales.
    """

    fqn: str
    shape: Index
    codes: Entry
    scales: Entry
    weight: Scaled
    others: tuple[Entry, ...] = ()

    @property
    def stored(self) -> tuple[Entry, ...]:
        """All stored tensors of the weight."""
        return self.codes, self.scales, *self.others

    @property
    def value_chunk(self) -> Chunk:
        """The dequantised weight as a chunk."""
        file = WeightValues(self.weight).name
        return contiguous(file, 0, self.weight.dtype, whole(self.shape))
