"""A path in an object store with the methods of `pathlib.Path` that readers and commits use.

Any method that is not overridden here and would access local files raises an error in `__fspath__`,
so that no local file is used by mistake.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PosixPath
from typing import Any, NoReturn

from reshard.errors import IncompleteError, UsageError
from reshard.system.ranges import RangeStream
from reshard.system.remote import reading
from reshard.system.remote.attempts import attempt
from reshard.system.remote.store import Info, Store, get_modification_time, get_store, get_version

_BUFFER = 64 << 10


class RemotePath(PosixPath):
    """``s3://bucket/key`` as a path; pure methods are pathlib's own."""

    _known: Info | None = None  # from the folder listing that yielded this path

    @property
    def store(self) -> Store:
        """The object store of this path.

        Raises:
            UsageError: this is a local path, or the store's library is not installed.
        """
        scheme = self.parts[0] if self.parts else ""
        if not scheme.endswith(":"):
            raise UsageError(self, "is a local path, but was joined to a path in an object store")
        return get_store(scheme[:-1])

    @property
    def key(self) -> str:
        """The filesystem's own name for this path, without the scheme."""
        return self.store.name_of(str(self))

    def __str__(self) -> str:
        # pathlib keeps only one of the two slashes behind the scheme.
        scheme, *rest = self.parts or ("",)
        return f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else super().__str__()

    def __fspath__(self) -> str:
        raise UsageError(self, "is in an object store, but this operation needs a local file")

    def info(self) -> Info | None:
        """Return what the store reports about this path, or None if there is no such object."""
        if self._known is not None:
            return self._known
        if len(self.parts) < 2:
            return None
        return self.store.find(str(self))

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object of this name or below it."""
        return self.info() is not None

    def is_file(self, **_: Any) -> bool:
        """Return whether this is an object."""
        info = self.info()
        return info is not None and info["type"] == "file"

    def is_dir(self, **_: Any) -> bool:
        """Return whether there are objects below this path."""
        info = self.info()
        return info is not None and info["type"] == "directory"

    def stat(self, **_: Any) -> os.stat_result:
        """Return type, size and modification time.

        Raises:
            FileNotFoundError: there is no such object.
        """
        info = self.info()
        if info is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        kind = stat.S_IFREG if info["type"] == "file" else stat.S_IFDIR
        when = get_modification_time(info)
        return os.stat_result((kind, 0, 0, 1, 0, 0, info["size"] or 0, when, when, when))

    @property
    def version(self) -> tuple[str, ...]:
        """Values that change whenever the object is rewritten; () if they are unknown."""
        info = self.info()
        return () if info is None else get_version(info)

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """Yield the children of this folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        listed = self.store.list_children(str(self))
        if not listed and not self.is_dir():
            raise FileNotFoundError(2, "there is no such folder", str(self))
        for name, info in listed.items():
            child = self / name
            child._known = info  # noqa: SLF001 - of this class
            yield child

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Return the children whose names match; patterns of several levels are not supported.

        Raises:
            UsageError: the pattern contains a slash.
        """
        if "/" in pattern:
            raise UsageError(self, f"the pattern {pattern!r} spans several folders")
        return (child for child in self.iterdir() if fnmatchcase(child.name, pattern))

    def rglob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yield everything below this path whose name matches."""
        for child in self.iterdir():
            if fnmatchcase(child.name, pattern):
                yield child
            if child.is_dir():
                yield from child.rglob(pattern)

    def resolve(self, strict: bool = False) -> RemotePath:  # noqa: ARG002, FBT002 - pathlib's own
        """Return this path: object stores have no links."""
        return self

    def absolute(self) -> RemotePath:
        """Return this path: a URL is absolute."""
        return self

    def is_absolute(self) -> bool:
        """Return True: a URL is absolute."""
        return True

    def is_symlink(self) -> bool:
        """Return False: object stores have no links."""
        return False

    def samefile(self, other_path: str | os.PathLike[str]) -> bool:
        """Return whether both paths are the same URL."""
        return str(self) == str(other_path)

    def read_bytes(self) -> bytes:
        """Return the content of the object.

        Raises:
            ReshardError: the object does not exist or cannot be read.
        """
        return bytes(attempt(str(self), lambda: self.store.files.cat_file(self.key)))

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return the content of the object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        """Write a small object with one request and return its size."""
        request = partial(self.store.files.pipe_file, self.key, bytes(data))
        attempt(str(self), request, "cannot be written")
        self.store.forget()
        return len(data)

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        """Write a small text with one request and return its size in bytes."""
        return self.write_bytes(data.encode())

    def remove(self) -> None:
        """Remove the object, if it exists."""
        with contextlib.suppress(IncompleteError):
            attempt(str(self), lambda: self.store.files.rm_file(self.key), "cannot be removed")

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder exists as soon as there is an object in it."""

    def chmod(self, *_: Any, **__: Any) -> None:
        """Do nothing: the store itself controls access."""

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        """Open the object as a stream of ranged reads.

        Raises:
            UsageError: the mode is not "rb".
        """
        if mode != "rb":
            raise UsageError(self, f"is in an object store and cannot be opened in mode {mode!r}")
        return io.BufferedReader(_ObjectStream(self), _BUFFER)

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        self.__fspath__()
        raise AssertionError("unreachable")

    rename = replace = unlink = rmdir = touch = symlink_to = hardlink_to = _refused


class _ObjectStream(RangeStream):
    def __init__(self, path: RemotePath) -> None:
        super().__init__(path.stat().st_size)
        self._file = reading.RemoteFile(str(path))

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(0, min(len(target), self._nbytes - self._at))]
        count = self._file.pread(target, self._at) if target else 0
        self._at += count
        return count
