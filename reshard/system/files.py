"""Access to files: pools of descriptors, reads of bounded size, and detection of short reads."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from reshard.errors import DAMAGED, REQUEST_PERMISSION, CorruptError, IncompleteError, ReshardError
from reshard.system import escaped, signals
from reshard.system.derived import Derived, Kept, list_files
from reshard.system.paths import as_path, is_remote
from reshard.system.ranges import FetchedRanges, Range, merge_ranges
from reshard.system.threads import are_files_slow, map_files
from reshard.system.versions import FileVersion, Versioned, refuse_change

if TYPE_CHECKING:
    from typing_extensions import Self

    from reshard.system.remote.reading import (
        RemoteFiles,  # imports fsspec, which is needed for URLs only
    )

MAX_DOCUMENT = 256 << 20  # bytes; the index of a million tensors has a third of that
MAX_POINTER = 4096  # bytes; for a file that names a directory
_LFS_POINTER = b"version https://"  # the first line goes on with git-lfs.github.com/spec/v1
LFS_HEAD = len(_LFS_POINTER)  # bytes that show whether a file is a pointer of Git LFS
_NEAR = 4 << 10  # bytes; to read so many more takes about as long as another read
_MAX_OPEN = 512  # descriptors in a pool


def _choose_pool_size() -> int:
    """Return the size of a pool: at most half of the process's limit (256 on macOS)."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if allowed == resource.RLIM_INFINITY else min(_MAX_OPEN, allowed // 2)


class OpenFiles:
    """A pool of descriptors that closes the one that was opened first; safe for threads."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._descriptors: dict[str, Descriptor] = {}
        self._most_open = _choose_pool_size()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor as soon as no read uses it."""
        with self._lock:
            self._descriptors.clear()

    def open(self, path: str) -> Descriptor:
        """Return a descriptor of the file, which stays open as long as the caller keeps it.

        Raises:
            IncompleteError: the file does not exist.
            ReshardError: it cannot be opened.
        """
        descriptor = self._descriptors.get(path)
        if descriptor is not None:  # without the lock, as every block of a conversion asks for it
            return descriptor
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is None:
                descriptor = self._open(path)
                self._descriptors[path] = descriptor
                if len(self._descriptors) > self._most_open:
                    self._drop(self._descriptors.pop(next(iter(self._descriptors))))
            return descriptor

    def _open(self, path: str) -> Descriptor:
        return Descriptor(path, self._flags)

    def _drop(self, descriptor: Descriptor) -> None:
        """Take leave of a descriptor that the pool has no room for; readers may still have it."""

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError: the file ends before the target is full.
            IncompleteError: the file does not exist.
            ReshardError: it cannot be read.
        """
        self.open(path).read_into(byte_offset, target)

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Return the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `read_into`.
        """
        # The method keeps the descriptor open. Otherwise the system could give its number to a file
        # that another thread opens.
        return self.open(path).read(byte_offset, nbytes)


class SourceFiles(OpenFiles):
    """A read-only pool of the files of a checkpoint, which may be local or in an object store.

    Every byte is of the version that ``files`` states: a file is compared with it when it is opened
    and, if the `with` block ends without an error, once more at the end. A file that is open keeps
    its descriptor, so it may be renamed, removed, or replaced by rename.

    Args:
        files: the files by path whose versions are fixed. The version of any other file is fixed
            when the pool opens it first.
    """

    def __init__(self, files: Mapping[str, Versioned] = MappingProxyType({})) -> None:
        super().__init__(os.O_RDONLY)
        self.kept: Kept = threading.local()
        self._files = files
        self._opened: dict[str, FileVersion] = {}  # every local file that was opened
        self._remote_files: RemoteFiles | None = None
        self._decoders: dict[str, escaped.Decoder] = {}
        self._fetched = FetchedRanges()

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.check()
        finally:
            self.close()

    def find_version(self, path: str) -> FileVersion:
        """Return the version of a file, which is opened if its version is not fixed yet.

        Raises:
            IncompleteError, ReshardError: as in `OpenFiles.open`.
        """
        if is_remote(path):
            return self._remote().open(path).version
        if path not in self._opened:
            self.open(path)
        return self._opened[path]

    def check(self) -> None:
        """Check that no file that this pool has read was changed since its version was fixed.

        Raises:
            CorruptError: a file was changed, so the bytes read may be of two versions.
        """
        for path in list(self._opened):
            descriptor = self._descriptors.get(path)
            if descriptor is not None:  # else it was checked when the pool had no room for it
                self._check_closing(descriptor)
        if self._remote_files is not None:
            self._remote_files.check()

    def check_unread(self, paths: Iterable[str]) -> None:
        """Check those of some files that this pool did not read; their headers were read before.

        A file that was removed in the meantime is not an error: nothing else is read from it.

        Raises:
            CorruptError: as `check`.
        """
        remote = []
        for path in paths:
            before = self._files[path].version
            if is_remote(path):
                remote.append(path)
            elif before is not None and path not in self._opened:
                with contextlib.suppress(FileNotFoundError):
                    now = FileVersion.from_status(os.stat(path))  # noqa: PTH116 - takes less time
                    refuse_change(path, before, now)
        if remote:
            self._remote().check_unread(remote)

    def check_read(self, names: Iterable[str]) -> None:
        """Check files that were just read like `check`, without opening them anew.

        Args:
            names: those of files or of computed bytes.

        Raises:
            CorruptError: as `check`.
        """
        for name in names:
            for path in list_files(name) if name not in self._descriptors else (name,):
                descriptor = self._descriptors.get(path)
                if descriptor is not None:
                    self._check_open(descriptor)
                elif self._remote_files is not None and is_remote(path):
                    self._remote_files.check([path])

    def _open(self, path: str) -> Descriptor:
        descriptor = super()._open(path)
        before, now = self._opened.get(path), descriptor.find_version()
        if before is None:
            file = self._files.get(path)
            before = file.version if file else None
        if before is not None:
            refuse_change(path, before, now)
        # A version from another process is less than what this process can compare.
        is_whole = before is not None and before.ctime_ns is not None
        self._opened[path] = before if before is not None and is_whole else now
        return descriptor

    def _drop(self, descriptor: Descriptor) -> None:
        self._check_closing(descriptor)

    def _check_closing(self, descriptor: Descriptor) -> None:
        # NFS asks the server for the state of a file only when it is opened.
        with contextlib.suppress(OSError):
            os.close(os.open(descriptor.path, os.O_RDONLY | os.O_CLOEXEC))
        self._check_open(descriptor)

    def _check_open(self, descriptor: Descriptor) -> None:
        """Check a file by its descriptor, which keeps the file also after a rename."""
        before = self._opened[descriptor.path]
        if before.matches(descriptor.find_status()):  # the rule, after each small read
            return
        now = descriptor.find_version()
        # To move or replace a file changes its ctime, too.
        if now.ctime_ns != before.ctime_ns and not descriptor.has_path():
            before = replace(before, ctime_ns=now.ctime_ns)
        refuse_change(descriptor.path, before, now)

    def read_into(self, path: str, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `OpenFiles.read_into`.
        """
        if isinstance(path, Derived):
            path.computation.read_into(self, byte_offset, target)
        elif escaped.is_escaped(path):
            self._decoder(path).read_into(byte_offset, target)
        elif (fetched := self._fetched.find(path, byte_offset, len(target))) is not None:
            target[:] = fetched
        elif is_remote(path):
            self._remote().read_into(path, byte_offset, target)
        else:
            super().read_into(path, byte_offset, target)

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Return the bytes at ``byte_offset``.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `read_into`.
        """
        fetched = self._fetched.find(path, byte_offset, nbytes)
        if fetched is not None:
            return fetched
        if _is_local(path):
            return super().read(path, byte_offset, nbytes)
        buffer = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)

    def find_local(self, path: str) -> Descriptor | None:
        """Return a descriptor of a file whose bytes are those of a local file, else None.

        Raises:
            IncompleteError, ReshardError: as in `OpenFiles.open`.
        """
        return self.open(path) if _is_local(path) else None

    def prefetch(self, ranges: Iterable[Range]) -> list[Range]:
        """Fetch ranges (file, byte offset, nbytes) that will be read next, many at a time.

        Those close together are fetched by one read. Where reads wait, many are in flight. What was
        fetched before is not fetched again.

        Returns:
            The ranges that are now also kept in memory, until they are dropped or the pool closes.

        Raises:
            CorruptError, IncompleteError, ReshardError: as in `read_into`.
        """
        stored = [
            place
            for place in ranges
            if not isinstance(place[0], Derived) and not escaped.is_escaped(place[0])
            if place[2] and self._fetched.find(*place) is None
        ]
        remote = list(merge_ranges(place for place in stored if is_remote(place[0])))
        local = list(
            merge_ranges((place for place in stored if not is_remote(place[0])), gap=_NEAR)
        )
        read = super().read
        fetched = map_files(local, lambda place: read(*place))
        if remote:
            fetched += self._remote().fetch(remote)
        for place, data in zip([*local, *remote], fetched, strict=True):
            self._fetched.put(place, data)
        return [*local, *remote]

    def drop(self, fetched: Iterable[Range]) -> None:
        """Free ranges that `prefetch` has fetched."""
        self._fetched.drop(fetched)

    def _decoder(self, path: str) -> escaped.Decoder:
        """Return the decoder of an escaped text; if two threads create one, both are equal."""
        decoder = self._decoders.get(path)
        if decoder is None:
            decoder = self._decoders[path] = escaped.Decoder(path, self.read)
        return decoder

    def _remote(self) -> RemoteFiles:
        if self._remote_files is None:
            from reshard.system.remote.reading import RemoteFiles

            self._remote_files = RemoteFiles(self._files)
        return self._remote_files


def _is_local(path: str) -> bool:
    return not (isinstance(path, Derived) or is_remote(path) or escaped.is_escaped(path))


_HAS_PREADV = hasattr(os, "preadv")


def _pread(descriptor: int, target: memoryview, byte_offset: int) -> int:
    """Read into ``target`` and return the number of bytes; without preadv (macOS), copy once."""
    if _HAS_PREADV:
        return os.preadv(descriptor, [target], byte_offset)
    data = os.pread(descriptor, len(target), byte_offset)
    target[: len(data)] = data
    return len(data)


class Section:
    """A byte range of a file, read as if it were a file of its own.

    Both ends are fetched at the start, because archives store their structure there. A small
    archive takes one read.
    """

    _WHOLE = 64 << 10  # bytes; a section up to this size is read as a whole
    _END = 4 << 10  # bytes to read at each end of a larger section
    _FEW = 8  # reads

    def __init__(self, pool: SourceFiles, path: str, start: int, nbytes: int) -> None:
        self.path = path
        self.start = start
        self.nbytes = nbytes
        self._pool = pool
        self._read = partial(pool.read, path)
        ends = self.find_ends(start, nbytes)
        fetched = self._fetch(ends) if ends[1][1] else []
        self._head, self._tail = (self._read(*end) if end[1] else b"" for end in ends)
        self._tail_offset = ends[1][0] - start
        pool.drop(fetched)

    @property
    def version(self) -> FileVersion:
        """The version of the file that is read."""
        return self._pool.find_version(self.path)

    @classmethod
    def find_ends(cls, start: int, nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the two ranges (byte offset, nbytes) of the file that are read at the start."""
        first = nbytes if nbytes <= cls._WHOLE else cls._END
        tail = max(first, nbytes - cls._END)
        return (start, first), (start + tail, nbytes - tail)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at an offset from the section's start.

        Raises:
            CorruptError: the bytes are not inside the section.
        """
        stop = offset + nbytes
        if offset < 0 or stop > self.nbytes:
            raise CorruptError(
                self.path,
                f"its structure refers to bytes {self.start + offset} to {self.start + stop}, but"
                f" the data end at byte {self.start + self.nbytes}",
                DAMAGED,
            )
        if stop <= len(self._head):
            return self._head[offset:stop]
        if offset >= self._tail_offset:
            return self._tail[offset - self._tail_offset : stop - self._tail_offset]
        return self._read(self.start + offset, nbytes)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges (offset, nbytes); see `SourceFiles.prefetch`."""
        self._fetch(
            [
                (self.start + offset, nbytes)
                for offset, nbytes in ranges
                if len(self._head) < offset + nbytes <= self.nbytes and offset < self._tail_offset
            ]
        )

    def _fetch(self, places: Sequence[tuple[int, int]]) -> list[Range]:
        # A few reads that do not wait are faster one by one; many show whether they wait.
        if len(places) <= self._FEW and not (is_remote(self.path) or are_files_slow()):
            return []
        return self._pool.prefetch((self.path, *place) for place in places)


class Descriptor:
    """A descriptor that is closed when neither the pool nor a reader or writer refers to it."""

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        signals.check()
        try:
            self.number = os.open(path, flags)
        except FileNotFoundError as error:
            raise IncompleteError(path, "does not exist", "was the checkpoint moved?") from error
        except OSError as error:
            raise _build_read_error(path, "opened", error) from error

    def find_status(self) -> os.stat_result:
        """Return what the file system states about the open file.

        Raises:
            ReshardError: it states nothing, as NFS about a file that another machine has removed.
        """
        try:
            return os.fstat(self.number)
        except OSError as error:
            raise _build_read_error(self.path, "read", error) from error

    def find_version(self) -> FileVersion:
        """Return the version of the open file."""
        return FileVersion.from_status(self.find_status())

    def has_path(self) -> bool:
        """Return whether the path still leads to the open file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.number))  # noqa: PTH116
        except OSError:
            return False

    def read(self, byte_offset: int, nbytes: int) -> bytes:
        """Return the bytes at ``byte_offset``.

        Raises:
            CorruptError, ReshardError: as in `OpenFiles.read_into`.
        """
        try:
            data = os.pread(self.number, nbytes, byte_offset)
        except OSError:  # `read_into` raises it again with an explanation
            data = b""
        if len(data) == nbytes:
            return data
        buffer = bytearray(nbytes)
        self.read_into(byte_offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``byte_offset``.

        Raises:
            CorruptError, ReshardError: as in `OpenFiles.read_into`.
        """
        done, nbytes = 0, len(target)
        while done < nbytes:
            try:
                rest = target[done:] if done else target
                count = _pread(self.number, rest, byte_offset + done)
            except OSError as error:
                raise _build_read_error(self.path, "read", error) from error
            if count == 0:
                raise CorruptError(
                    self.path,
                    f"expected {nbytes} bytes at offset {byte_offset}, but the file ends after"
                    f" {done}",
                    "the file became shorter while it was read: is a job still writing to it?",
                )
            done += count

    def close(self) -> None:
        """Close the descriptor now, even if it is still referred to."""
        # The system may give the number to another file at once: it must not be closed twice.
        number, self.number = self.number, -1
        if number >= 0:
            # The descriptor is closed even if the system reports an error, which can only be about
            # writes, and a source has none.
            with contextlib.suppress(OSError):
                os.close(number)

    def __del__(self) -> None:
        # The file may not have been opened: `__init__` then raised an error.
        if hasattr(self, "number"):
            self.close()


def _build_read_error(path: str | Path, verb: str, error: OSError) -> ReshardError:
    advice = REQUEST_PERMISSION if isinstance(error, PermissionError) else ""
    return ReshardError(path, f"cannot be {verb}: {error.strerror}", advice)


def get_size(path: str | Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        IncompleteError, ReshardError: as `find_version`.
    """
    return find_version(path).nbytes


def find_version(path: str | Path) -> FileVersion:
    """Return the version that a file has now.

    Raises:
        IncompleteError: there is no such file.
        ReshardError: the file system does not tell.
    """
    if is_remote(str(path)):
        from reshard.system.remote.reading import RemoteFile

        return RemoteFile(str(as_path(path))).version
    try:
        # `os.stat` of a text takes a fifth of the time that a Path takes to be made.
        return FileVersion.from_status(os.stat(path))  # noqa: PTH116
    except FileNotFoundError as error:
        raise IncompleteError(path, "does not exist") from error
    except OSError as error:
        raise _build_read_error(path, "read", error) from error


def check_unchanged(files: Mapping[str, Versioned]) -> None:
    """Check that files still have the versions that are fixed.

    Raises:
        CorruptError: a file was changed, so what was read may be of two versions.
    """
    SourceFiles(files).check_unread(files)


def refuse_lfs_pointer(path: str | Path, head: bytes) -> None:
    """Refuse a file that `git clone` without Git LFS leaves in place of a large file.

    Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md ("The Pointer").

    Args:
        head: the first `LFS_HEAD` bytes of the file or more.

    Raises:
        IncompleteError: the file is such a pointer.
    """
    if head.startswith(_LFS_POINTER):
        raise IncompleteError(
            path,
            "is a pointer of Git LFS, not the file itself",
            "run `git lfs pull` in its repository, or download the file again",
        )


def read_small_file(path: str | Path, most: int = MAX_DOCUMENT) -> bytes:
    """Return the content of a file that is read as a whole: a pointer, a document, a tokenizer.

    Raises:
        IncompleteError: there is no such file.
        CorruptError: it is larger than `most` bytes.
        ReshardError: it cannot be read.
    """
    nbytes = get_size(path)
    if nbytes > most:
        raise CorruptError(
            path,
            f"has {nbytes} bytes, but files of this kind have at most {most}",
            "check that this is the right file and that it was not altered",
        )
    if nbytes and not is_remote(str(path)):
        # `read_bytes` also reads once behind the end: one more round trip.
        return Descriptor(str(path), os.O_RDONLY | os.O_CLOEXEC).read(0, nbytes)
    try:
        return as_path(path).read_bytes()
    except OSError as error:
        raise _build_read_error(path, "read", error) from error
