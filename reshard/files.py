"""Access to files by descriptor: a pool of them, bounded reads, no short read unseen."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from reshard import escaped
from reshard.errors import CorruptError, IncompleteError, ReshardError
from reshard.paths import as_path, is_remote

if TYPE_CHECKING:
    from typing_extensions import Self

    from reshard.remote.reading import RemoteFiles  # which imports fsspec, for who has URLs

MAX_DOCUMENT = 256 << 20  # bytes: the index of a million tensors is a third of it
MAX_POINTER = 4096  # bytes of a file that names a directory
_MAX_OPEN = 512  # descriptors of a pool


def _most_open() -> int:
    """Half of what the process may have open, where that is less (macOS: 256)."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if allowed == resource.RLIM_INFINITY else min(_MAX_OPEN, allowed // 2)


class OpenFiles:
    """A pool of descriptors, least recently used closed first. Safe for threads."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._descriptors: OrderedDict[str, Descriptor] = OrderedDict()
        self._most_open = _most_open()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor, once no read runs on it."""
        with self._lock:
            self._descriptors.clear()

    def open(self, path: str) -> Descriptor:
        """A descriptor of the file, for as long as the caller holds it.

        Raises:
            IncompleteError: the file is not there.
            ReshardError: it cannot be opened.
        """
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is None:
                descriptor = self._descriptors[path] = Descriptor(path, self._flags)
                if len(self._descriptors) > self._most_open:
                    self._descriptors.popitem(last=False)
            else:
                self._descriptors.move_to_end(path)
            return descriptor

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError: the file ends before the target is full.
            IncompleteError: the file is not there.
            ReshardError: it cannot be read.
        """
        self.open(path).read_into(byte_offset, target)

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """The bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as `read_into`.
        """
        descriptor = self.open(path)  # held: else another thread's file may get its number
        with contextlib.suppress(OSError):  # which read_into meets again and explains
            data = os.pread(descriptor.number, nbytes, byte_offset)
            if len(data) == nbytes:
                return data
        buffer = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)


class SourceFiles(OpenFiles):
    """The files of a checkpoint, which are never written to, here or in an object store."""

    def __init__(self) -> None:
        super().__init__(os.O_RDONLY)
        self._far: RemoteFiles | None = None
        self._decoders: dict[str, escaped.Decoder] = {}

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as `OpenFiles.read_into`.
        """
        if escaped.is_escaped(path):
            self._decoder(path).read_into(byte_offset, target)
        elif is_remote(path):
            self._remote().read_into(path, byte_offset, target)
        else:
            super().read_into(path, byte_offset, target)

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """The bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as `read_into`.
        """
        if not (is_remote(path) or escaped.is_escaped(path)):
            return super().read(path, byte_offset, nbytes)
        buffer = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """Say which (file, byte offset, nbytes) will be read: an object store gives them at once.

        Files of this machine are as quick without.

        Returns:
            What is kept in memory now, until it is dropped or the pool is closed.
        """
        far = [wanted for wanted in ranges if is_remote(wanted[0])]
        return self._remote().expect(far) if far else []

    def drop(self, kept: Iterable[tuple[str, int, int]]) -> None:
        """Keep no longer what was expected."""
        if self._far is not None:
            self._far.drop(kept)

    def _decoder(self, path: str) -> escaped.Decoder:
        """What reads a text of a pickle as bytes; threads may make it twice, to the same end."""
        found = self._decoders.get(path)
        if found is None:
            found = self._decoders[path] = escaped.Decoder(path, self.read)
        return found

    def _remote(self) -> RemoteFiles:
        if self._far is None:
            from reshard.remote.reading import RemoteFiles

            self._far = RemoteFiles()
        return self._far


def _pread(descriptor: int, target: memoryview, byte_offset: int) -> int:
    """Read into ``target``; how many bytes came. macOS lacks preadv and takes a copy more."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], byte_offset)
    data = os.pread(descriptor, len(target), byte_offset)
    target[: len(data)] = data
    return len(data)


class Section:
    """A byte range of a file, read as if it were a file by itself.

    Both ends are fetched at once, because that is where archives keep their structure: an archive
    of a few kilobytes costs one read.
    """

    _WHOLE = 8 << 10  # bytes that are read at once
    _END = 2 << 10

    def __init__(self, pool: SourceFiles, path: str, start: int, nbytes: int) -> None:
        self.path = path
        self.start = start
        self.nbytes = nbytes
        self._pool = pool
        first = nbytes if nbytes <= self._WHOLE else self._END
        self._head = pool.read(path, start, first)
        self._tail_offset = max(first, nbytes - self._END)
        self._tail = pool.read(path, start + self._tail_offset, nbytes - self._tail_offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes at an offset that counts from the section's start.

        Raises:
            CorruptError: they do not lie inside the section.
        """
        stop = offset + nbytes
        if offset < 0 or stop > self.nbytes:
            raise CorruptError(
                self.path,
                f"bytes {self.start + offset} to {self.start + stop} are claimed, the data end at"
                f" {self.start + self.nbytes}",
                "the file is truncated or was altered: fetch it again",
            )
        if stop <= len(self._head):
            return self._head[offset:stop]
        if offset >= self._tail_offset:
            return self._tail[offset - self._tail_offset : stop - self._tail_offset]
        return self._pool.read(self.path, self.start + offset, nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say which (offset, nbytes) will be read one by one."""
        if is_remote(self.path):
            self._pool.expect(
                (self.path, self.start + offset, nbytes)
                for offset, nbytes in ranges
                if len(self._head) < offset + nbytes and offset < self._tail_offset
            )


class Descriptor:
    """A descriptor that closes when the pool and all who read or write have let go of it."""

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        try:
            self.number = os.open(path, flags)
        except FileNotFoundError as error:
            raise IncompleteError(path, "is not there", "was the checkpoint moved?") from error
        except OSError as error:
            raise ReshardError(path, f"cannot be opened: {error.strerror}") from error

    def read_into(self, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError, ReshardError: as `OpenFiles.read_into`.
        """
        done, wanted = 0, len(target)
        while done < wanted:
            try:
                rest = target[done:] if done else target
                count = _pread(self.number, rest, byte_offset + done)
            except OSError as error:
                raise ReshardError(self.path, f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise CorruptError(
                    self.path,
                    f"{wanted} bytes expected at {byte_offset}, the file ends after {done}",
                    "the file became shorter while it was read: is a job still writing to it?",
                )
            done += count

    def close(self) -> None:
        """Close it now, whoever still holds it."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self.close()


def size_of(path: str | Path) -> int:
    """Size of a file in bytes.

    Raises:
        IncompleteError: there is no such file.
        ReshardError: it cannot be looked at.
    """
    try:
        return as_path(path).stat().st_size
    except FileNotFoundError as error:
        raise IncompleteError(path, "is not there") from error
    except OSError as error:
        raise ReshardError(path, f"cannot be read: {error.strerror}") from error


def small(path: str | Path, most: int = MAX_DOCUMENT) -> bytes:
    """The content of a file that is read as a whole: a pointer, a document, a tokenizer.

    Raises:
        IncompleteError: there is no such file.
        CorruptError: it is larger than any such file.
        ReshardError: it cannot be read.
    """
    nbytes = size_of(path)
    if nbytes > most:
        raise CorruptError(
            path,
            f"has {nbytes} bytes; a file of its name has at most {most}",
            "it is another file, or was altered",
        )
    try:
        return as_path(path).read_bytes()
    except OSError as error:
        raise ReshardError(path, f"cannot be read: {error.strerror}") from error
