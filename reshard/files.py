"""Read-only access to source files: bounded reads, a pool of descriptors, no short read unseen."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from reshard.errors import CorruptError, IncompleteError, ReshardError

_MAX_OPEN = 512  # below the usual limit of 1024 descriptors a process


class SourceFiles:
    """A pool of read-only descriptors, least recently used closed first. Safe for threads."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            self._descriptors.clear()

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError: the file ends before the target is full.
            IncompleteError: the file is not there.
        """
        descriptor = self._open(path)
        done = 0
        while done < len(target):
            try:
                count = _pread(descriptor.number, target[done:], byte_offset + done)
            except OSError as error:
                raise ReshardError(path, f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise CorruptError(
                    path,
                    f"{len(target)} bytes expected at {byte_offset}, the file ends after {done}",
                    "the file became shorter while it was read: is a job still writing to it?",
                )
            done += count

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """The bytes at ``byte_offset``; errors as in `read_into`."""
        buffer = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)

    def _open(self, path: str) -> _Descriptor:
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is None:
                descriptor = self._descriptors[path] = _Descriptor(path)
                if len(self._descriptors) > _MAX_OPEN:
                    self._descriptors.popitem(last=False)
            else:
                self._descriptors.move_to_end(path)
            return descriptor


def _pread(descriptor: int, target: memoryview, byte_offset: int) -> int:
    """Read into ``target``; how many bytes came. macOS lacks preadv and takes a copy more."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], byte_offset)
    data = os.pread(descriptor, len(target), byte_offset)
    target[: len(data)] = data
    return len(data)


class _Descriptor:
    """A descriptor that closes when the pool and the last running read have let go of it."""

    def __init__(self, path: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise IncompleteError(path, "is not there", "was the checkpoint moved?") from error
        except OSError as error:
            raise ReshardError(path, f"cannot be opened: {error.strerror}") from error

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def size_of(path: str | Path) -> int:
    """Size of a file in bytes.

    Raises:
        IncompleteError: there is no such file.
    """
    try:
        return Path(path).stat().st_size
    except FileNotFoundError as error:
        raise IncompleteError(path, "is not there") from error
    except OSError as error:
        raise ReshardError(path, f"cannot be read: {error.strerror}") from error
