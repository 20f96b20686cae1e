"""A dequantised weight as computed bytes: values that no file stores."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.derived import Derived, Reader
from reshard.quantised.scaled import Scaled


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a quantised weight, row-major; it implements `derived.Computation`."""

    weight: Scaled

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        return self.weight.numel * self.weight.dtype.itemsize

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store codes and scales."""
        return tuple(dict.fromkeys((self.weight.codes.file, self.weight.scales.file)))

    @property
    def tile_nbytes(self) -> int:
        """The size of a row of blocks: their scales are read together."""
        weight = self.weight
        if weight.transposed:
            return weight.rows * weight.block[1] * weight.dtype.itemsize
        return weight.columns * weight.block[0] * weight.dtype.itemsize

    @property
    def name(self) -> Derived:
        """The name under which the values can be read."""
        codes = self.weight.codes
        return Derived(codes.file, f"values of {self.weight.fqn} at {codes.byte_offset}", self)

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on.

        Raises:
            CorruptError: a scale is infinite or not a number.
            ReshardError: a file cannot be read.
        """
        from reshard.quantised import decode  # imports numpy

        decode.read_values(pool, self.weight, byte_offset // self.weight.dtype.itemsize, target)
