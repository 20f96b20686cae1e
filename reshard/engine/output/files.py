"""Output files: created at their full size, written at offsets, and read back."""

from __future__ import annotations

import os
from pathlib import Path

from reshard.core.manifest import OutputFile
from reshard.engine.output.local import build_disk_error
from reshard.errors import DifferentError
from reshard.system.compiled import find_compiled
from reshard.system.files import Descriptor, OpenFiles

_reads = find_compiled("reshard.system._reads")

_PIECE_BYTES = 128 << 10  # the compiled module reads back so many at a time
BLOCK_BYTES = 512 << 10  # small enough that a block stays in a core's cache until it is read back


def write_at(descriptor: int, data: memoryview, byte_offset: int) -> None:
    """Write all of `data`; a single system call may write less."""
    done, nbytes = 0, len(data)
    while done < nbytes:
        done += os.pwrite(descriptor, data[done:] if done else data, byte_offset + done)


class OutputFiles(OpenFiles):
    """A pool of files of one directory, opened for writing and reading."""

    def __init__(self, directory: Path) -> None:
        super().__init__(os.O_RDWR)
        self.directory = directory
        self._folders: set[Path] = set()  # known to exist
        self._prefix = os.path.join(directory, "")  # noqa: PTH118 - `path` runs once a block

    def close(self) -> None:
        """Close every file, even if the traceback of an error still refers to it."""
        for descriptor in self._descriptors.values():
            descriptor.close()
        super().close()

    def create(self, file: OutputFile, *, is_new: bool = True) -> None:
        """Create a file of its full size, filled with zeros.

        Args:
            file: its name and size.
            is_new: whether the file must not exist yet; otherwise an existing file is kept.

        Raises:
            ResourceError: the disk is full.
            ReshardError: the file cannot be written.
        """
        path = Path(self.path(file.name))
        folder = path.parent
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else 0)
        try:
            if folder not in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
                self._folders.add(folder)
            descriptor = os.open(path, flags, 0o666)
            try:
                os.ftruncate(descriptor, file.nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise build_disk_error(path, error) from error

    def output(self, name: str) -> Descriptor:
        """Return an open output file; it stays open as long as the caller keeps the object."""
        return self.open(self.path(name))

    def forget(self, name: str) -> None:
        """Close a finished file."""
        with self._lock:
            self._descriptors.pop(self.path(name), None)

    def path(self, name: str) -> str:
        """Return the path of an output file."""
        return self._prefix + name


class FileWriter:
    """One thread's writer, which reads back what it has written if `verify` is set."""

    def __init__(self, files: OutputFiles, *, verify: bool) -> None:
        self._files = files
        self._back = bytearray(BLOCK_BYTES if verify else 0)
        self._whole = memoryview(self._back)
        self._piece = self._whole[:_PIECE_BYTES]

    def write(self, name: str, byte_offset: int, data: memoryview) -> None:
        """Write bytes at an offset, then read them back block by block.

        The file system locks a file while it is written. One write of all bytes makes other threads
        wait less often than a write of each block.

        Raises:
            DifferentError: the file does not hold what was written.
            ResourceError: the disk is full.
        """
        file = self._files.output(name)
        _write(file, byte_offset, data)
        for start in range(0, len(data) if self._back else 0, BLOCK_BYTES):
            self._check(file, byte_offset + start, data[start : start + BLOCK_BYTES])

    def _check(self, file: Descriptor, byte_offset: int, block: memoryview) -> None:
        equal = _reads and _reads.equals(file.number, byte_offset, block, self._piece)
        if equal is None:  # not compiled, or the file cannot be read, which this call explains
            equal = self._read_back(file, byte_offset, len(block)) == block
        if not equal:
            raise _build_difference(
                file.path, byte_offset, len(block), "the disk and its file system"
            )

    def _read_back(self, file: Descriptor, byte_offset: int, nbytes: int) -> bytearray:
        """Return what the file holds, valid until the next call."""
        # A bytearray and a buffer are compared by one memcmp, two memoryviews byte by byte. Only a
        # block that is not full needs a slice, which is a copy.
        if nbytes == BLOCK_BYTES:
            file.read_into(byte_offset, self._whole)
            return self._back
        file.read_into(byte_offset, self._whole[:nbytes])
        return self._back[:nbytes]


def check_read_back(
    path: str,
    byte_offset: int,
    written: bytes | memoryview,
    stored: bytes | bytearray,
    suspect: str,
) -> None:
    """Compare bytes that were read back with those that were written.

    Args:
        path: a local path or a URL.
        byte_offset: where the bytes are in the file.
        written: the bytes as they should be; comparing buffers of bytes is a single memcmp.
        stored: the bytes as they were read back.
        suspect: what may have changed them, for the message.

    Raises:
        DifferentError: they differ.
    """
    if stored != written:
        raise _build_difference(path, byte_offset, len(written), suspect)


def _build_difference(path: str, byte_offset: int, nbytes: int, suspect: str) -> DifferentError:
    return DifferentError(
        path,
        f"bytes {byte_offset} to {byte_offset + nbytes} differ from what was written when they are"
        " read back",
        f"check {suspect}; the output was discarded",
    )


def _write(file: Descriptor, byte_offset: int, data: memoryview) -> None:
    try:
        write_at(file.number, data, byte_offset)
    except OSError as error:
        raise build_disk_error(Path(file.path), error) from error
