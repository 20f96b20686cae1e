"""The files of an output while they are made: at their full size, written at offsets, read back."""

from __future__ import annotations

import os
from pathlib import Path

from reshard.errors import DifferentError
from reshard.files import Descriptor, OpenFiles
from reshard.manifest import OutputFile
from reshard.output.partial import disk_error

BLOCK_BYTES = 512 << 10  # written and read back while it is in a core's cache


def write_at(descriptor: int, data: memoryview, byte_offset: int) -> None:
    """Write all of it: one call of the system may write less."""
    while data:
        count = os.pwrite(descriptor, data, byte_offset)
        data, byte_offset = data[count:], byte_offset + count


class OutputFiles(OpenFiles):
    """Files of a directory, opened to write and to read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(os.O_RDWR)
        self.directory = directory
        self._folders: set[Path] = set()  # that are there
        self._prefix = os.path.join(directory, "")  # noqa: PTH118 - a path is made for every block

    def close(self) -> None:
        """Close every file at once: an error that is on its way out may hold one of them."""
        for descriptor in self._descriptors.values():
            descriptor.close()
        super().close()

    def create(self, file: OutputFile, *, anew: bool = True) -> None:
        """A file at its full size, all zeros; one that an earlier run left is taken on as it is.

        Raises:
            ResourceError: the disk is full.
            ReshardError: it cannot be written.
        """
        path = Path(self.path(file.name))
        folder = path.parent
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if anew else 0)
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
            raise disk_error(path, error) from error

    def output(self, name: str) -> Descriptor:
        """A file of the output, for as long as the caller holds it."""
        return self.open(self.path(name))

    def forget(self, name: str) -> None:
        """Close a file that is done."""
        with self._lock:
            self._descriptors.pop(self.path(name), None)

    def path(self, name: str) -> str:
        """Where a file of the output lies."""
        return self._prefix + name


class Writer:
    """One thread's way into the files; what it writes it also reads back, where that is asked."""

    def __init__(self, files: OutputFiles, *, verify: bool) -> None:
        self._files = files
        self._back = bytearray(BLOCK_BYTES if verify else 0)
        self._whole = memoryview(self._back)

    def write(self, name: str, byte_offset: int, data: memoryview) -> None:
        """Write bytes at an offset, block by block.

        Raises:
            DifferentError: the file does not hold what was written.
            ResourceError: the disk is full.
        """
        file = self._files.output(name)
        if not self._back:
            _write(file, byte_offset, data)
            return
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            _write(file, byte_offset + start, block)
            self._check(file, byte_offset + start, block)

    def _check(self, file: Descriptor, byte_offset: int, block: memoryview) -> None:
        """Compare with what the file holds: one comparison of memory, as bytearrays have it."""
        nbytes = len(block)
        if nbytes == BLOCK_BYTES:
            file.read_into(byte_offset, self._whole)
            held = self._back
        else:
            file.read_into(byte_offset, self._whole[:nbytes])
            held = self._back[:nbytes]
        if held != block:
            raise DifferentError(
                file.path,
                f"bytes {byte_offset} to {byte_offset + nbytes} read back differ from those"
                " written",
                "the disk or its file system is at fault: nothing was kept",
            )


def _write(file: Descriptor, byte_offset: int, data: memoryview) -> None:
    try:
        write_at(file.number, data, byte_offset)
    except OSError as error:
        raise disk_error(Path(file.path), error) from error
