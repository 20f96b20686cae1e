"""Computed bytes for tests: a number of zeros that are computed in tiles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Computed:
    """A computation of zeros."""

    nbytes: int
    tile_nbytes: int = 1
    files: tuple[str, ...] = ()

    def read_into(self, pool, byte_offset, target):
        """Fill the target with zeros."""
        assert pool is not None
        assert 0 <= byte_offset <= self.nbytes - len(target)
        target[:] = bytes(len(target))
