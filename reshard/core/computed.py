"""Values of a tensor that no file stores: each is computed from one element of every source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from reshard.core.box import whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import Entry
from reshard.system.derived import Derived, Reader, list_files


@dataclass(frozen=True, eq=False)
class ComputedValues(ABC):
    """The values of a tensor, row-major; it implements `derived.Computation`.

    Args:
        sources: the tensors that the values are computed from, all of the same shape.
    """

    sources: tuple[Entry, ...]

    @property
    @abstractmethod
    def detail(self) -> str:
        """The text that distinguishes the values from others of the same files."""

    @abstractmethod
    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on."""

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return FLOAT32

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.sources[0].numel * self.dtype.itemsize

    @property
    def tile_nbytes(self) -> int:
        """The size of one element: any range of elements is computed by itself."""
        return self.dtype.itemsize

    @property
    def files(self) -> tuple[str, ...]:
        """The files that store the sources."""
        return list_source_files(self.sources)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The values as the chunks of a tensor."""
        if not self.sources[0].numel:
            return ()
        name = Derived(self.files[0], self.detail, self)
        return (contiguous(name, 0, self.dtype, whole(self.sources[0].shape)),)


def list_source_files(tensors: Iterable[Entry | None]) -> tuple[str, ...]:
    """Return the files on disk that store tensors, or what their values are computed from."""
    names = (name for entry in tensors if entry for name in entry.layout.file_table[1])
    return tuple(dict.fromkeys(path for name in names for path in list_files(name)))
