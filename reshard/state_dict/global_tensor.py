"""A tensor of known global shape, whose chunks are in the files of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Placement


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of known global shape, and the chunks of it that the files hold.

    Args:
        device: device type of a DTensor's mesh; empty if none is stated.
        placement: how the axes of that mesh cut the tensor; empty if it is not stated.
        division: how the ranks divided the tensor, as text; empty if it is not stated.
    """

    dtype: DType
    shape: Index
    chunks: tuple[Chunk, ...]
    device: str = ""
    placement: Placement = ()
    division: str = ""

    def make_entry(self, fqn: str, kind: str) -> Entry:
        """Return the tensor as a manifest's entry."""
        return Entry(fqn, kind, self.dtype, self.shape, self.chunks)
