"""Values that differ by a constant between two sides: norms of ``1 + weight`` and of ``weight``.

The bytes are computed when they are read: no file stores them. The sum is rounded to the stored
dtype, as Megatron-Bridge rounds it (``RMSNorm2ZeroCenteredRMSNormMapping``); in float32 it is exact
for the values of a norm that was trained in a 16-bit dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.system.derived import Derived, Reader, list_files


@dataclass(frozen=True, slots=True)
class Shifted:
    """A file's values plus a constant, at the file's own offsets (`derived.Computation`).

    Args:
        file: the file; it may be computed itself.
        dtype: dtype of the values.
        added: the constant.
        nbytes: where the values end in the file.
    """

    file: str
    dtype: DType
    added: float
    nbytes: int

    @property
    def files(self) -> tuple[str, ...]:
        """The files on disk that the values are computed from."""
        return list_files(self.file)

    @property
    def tile_nbytes(self) -> int:
        """The size of one value: each is computed on its own."""
        inner = self.file
        return inner.computation.tile_nbytes if isinstance(inner, Derived) else self.dtype.itemsize

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the values from a byte offset on."""
        import torch

        pool.read_into(self.file, byte_offset, target)
        if len(target):
            torch.frombuffer(target, dtype=self.dtype.to_torch()).add_(self.added)


def add_to_chunks(chunks: Iterable[Chunk], added: float) -> Iterator[Chunk]:
    """Yield the chunks with a constant added to every value."""
    for chunk in chunks:
        # A chunk's values are multiplied by its factor after they are read.
        constant = added / chunk.factor
        values = Shifted(chunk.file, chunk.dtype, constant, chunk.byte_span[1])
        detail = f"{chunk.dtype.name} {constant:+} up to {values.nbytes}"
        yield replace(chunk, file=Derived(chunk.file, detail, values))
