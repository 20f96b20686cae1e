"""Bytes that are computed from stored bytes when they are read, addressed like those of a file.

A chunk names its file. If the name is a `Derived`, `reshard.system.files.SourceFiles` asks its
computation for the bytes. Everything that cuts, copies, casts or compares chunks therefore works on
values that no file stores, such as dequantised weights.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from reshard.system import escaped

Kept: TypeAlias = "threading.local | SimpleNamespace"
"""Values that computations keep, either for each thread or for a reader of one thread at a time."""


class Reader(Protocol):
    """The reads that a computation may do; `reshard.system.files.SourceFiles` has them."""

    @property
    def kept(self) -> Kept:
        """What computations keep between two reads; it is freed with the reader."""

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes | bytearray:
        """Return the bytes at an offset of a file."""

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at an offset of a file."""


class Computation(Protocol):
    """A computation of a number of bytes."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that can be read."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files on disk that the bytes are computed from."""

    @property
    def tile_nbytes(self) -> int:
        """The number of bytes that are computed together; reads of whole tiles cost least."""

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at an offset, of whole elements.

        Raises:
            ReshardError: a file cannot be read, or does not hold what the computation needs.
        """


@runtime_checkable
class Rounding(Protocol):
    """A computation of float32 values that can also give them in bfloat16, in one pass."""

    def read_rounded(self, pool: Reader, byte_offset: int, target: memoryview) -> int | None:
        """Fill ``target`` with the values from an offset on, rounded to nearest even.

        Args:
            byte_offset: the offset of the first of them in float32.
            target: two bytes for each value.

        Returns:
            The number of finite values that became infinite; None if the computation cannot do this
            here and has not filled the target.

        Raises:
            ReshardError: as in `Computation.read_into`.
        """


class Derived(str):
    """The name of computed bytes, with their computation. Equal names mean equal bytes."""

    __slots__ = ("computation", "follows", "rounding")
    computation: Computation
    follows: str
    rounding: Rounding | None
    """The computation, if it can round."""

    def __new__(
        cls, file: str, detail: str, computation: Computation, *, follows: str = ""
    ) -> Derived:
        """Return the name of bytes that are computed from a file.

        Args:
            file: the first file that they are computed from.
            detail: distinguishes the bytes from others that are computed from the file.
            computation: how to compute them.
            follows: the name of other bytes, after which these cost less: their computation keeps
                what this one needs.
        """
        name = super().__new__(cls, f"{file}\0{detail}")  # no file of any system has NUL in it
        name.computation = computation
        # This check of a protocol takes 15 microseconds with Python 3.11, too long for each read.
        name.rounding = computation if isinstance(computation, Rounding) else None
        name.follows = follows
        return name

    @property
    def detail(self) -> str:
        """The text that distinguishes the bytes from others of the same file."""
        return self.partition("\0")[2]

    def __getnewargs_ex__(self) -> tuple[tuple[str, str, Computation], dict[str, str]]:
        """Return the arguments that make an equal name in another process."""
        file, _, detail = self.partition("\0")
        return (file, detail, self.computation), {"follows": self.follows}


class ZeroBytes(NamedTuple):
    """Zeros, which no file stores; it implements `Computation`.

    Args:
        files: the files that have the other values of the tensor.
    """

    files: tuple[str, ...]
    nbytes: int

    @property
    def tile_nbytes(self) -> int:
        """The size of a byte: each is computed on its own."""
        return 1

    def read_into(self, _pool: Reader, _byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with zeros."""
        target[:] = bytes(len(target))


def list_files(file: str) -> tuple[str, ...]:
    """Return the files on disk that hold the bytes read under a file name."""
    if isinstance(file, Derived):
        return file.computation.files
    return (escaped.get_real_file(file),)
