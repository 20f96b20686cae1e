"""A path of an object store with the methods of `pathlib.Path` that readers and commits use.

What is not overridden here and would touch this machine's files ends in an error by `__fspath__`,
and never in a look at the wrong place.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import PosixPath
from typing import Any, NoReturn

from reshard import signals
from reshard.errors import IncompleteError, UsageError
from reshard.remote import reading
from reshard.remote.attempts import attempt
from reshard.remote.store import Info, Store, store, version_of, written_at

_BUFFER = 64 << 10


class RemotePath(PosixPath):
    """``s3://bucket/key`` as a path; pure methods are pathlib's own."""

    _known: Info | None = None  # from the listing that it came out of

    @property
    def store(self) -> Store:
        """Where it lies.

        Raises:
            UsageError: it is none of an object store, or its library is not installed.
        """
        scheme = self.parts[0] if self.parts else ""
        if not scheme.endswith(":"):
            raise UsageError(self, "is a path of this machine, joined to one of an object store")
        return store(scheme[:-1])

    @property
    def key(self) -> str:
        """What its filesystem calls it."""
        return self.store.name_of(str(self))

    def __str__(self) -> str:
        scheme, *rest = self.parts or ("",)
        return f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else super().__str__()

    def __fspath__(self) -> str:
        raise UsageError(self, "is in an object store, and this needs a file of this machine")

    def info(self) -> Info | None:
        """What its store says of it; None where there is nothing."""
        if self._known is not None:
            return self._known
        if len(self.parts) < 2:
            return None
        return self.store.find(str(self))

    def exists(self, **_: Any) -> bool:
        """Whether there is an object of this name, or one below it."""
        return self.info() is not None

    def is_file(self, **_: Any) -> bool:
        """Whether it is an object."""
        info = self.info()
        return info is not None and info["type"] == "file"

    def is_dir(self, **_: Any) -> bool:
        """Whether objects lie below it."""
        info = self.info()
        return info is not None and info["type"] == "directory"

    def stat(self, **_: Any) -> os.stat_result:
        """Kind, size and time of change.

        Raises:
            FileNotFoundError: there is nothing.
        """
        info = self.info()
        if info is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        kind = stat.S_IFREG if info["type"] == "file" else stat.S_IFDIR
        when = written_at(info)
        return os.stat_result((kind, 0, 0, 1, 0, 0, info["size"] or 0, when, when, when))

    @property
    def version(self) -> tuple[str, ...]:
        """What is another once it was written anew; nothing where there is none."""
        info = self.info()
        return () if info is None else version_of(info)

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """What lies directly below it.

        Raises:
            FileNotFoundError: nothing does.
        """
        listed = self.store.listing(str(self))
        if not listed and not self.is_dir():
            raise FileNotFoundError(2, "there is no such folder", str(self))
        for name, info in listed.items():
            child = self / name
            child._known = info  # noqa: SLF001 - of this class
            yield child

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Children whose names match; deeper patterns are not needed here.

        Raises:
            UsageError: a pattern over several folders.
        """
        if "/" in pattern:
            raise UsageError(self, f"no pattern over several folders: {pattern!r}")
        return (child for child in self.iterdir() if fnmatchcase(child.name, pattern))

    def rglob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Everything below whose name matches."""
        for child in self.iterdir():
            if fnmatchcase(child.name, pattern):
                yield child
            if child.is_dir():
                yield from child.rglob(pattern)

    def resolve(self, strict: bool = False) -> RemotePath:  # noqa: ARG002, FBT002 - pathlib's own
        """Itself: no links there."""
        return self

    def absolute(self) -> RemotePath:
        """Itself: a URL is."""
        return self

    def is_absolute(self) -> bool:
        """A URL is."""
        return True

    def is_symlink(self) -> bool:
        """There are none."""
        return False

    def samefile(self, other_path: str | os.PathLike[str]) -> bool:
        """Whether both are one URL."""
        return str(self) == str(other_path)

    def read_bytes(self) -> bytes:
        """The object, whole.

        Raises:
            ReshardError: it is not there, or cannot be read.
        """
        return bytes(attempt(str(self), lambda: self.store.files.cat_file(self.key)))

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        """Write a small object at once."""

        def send() -> None:
            with signals.deferred():  # else it may come to lie there when others have been removed
                self.store.files.pipe_file(self.key, bytes(data))

        attempt(str(self), send, "cannot be written")
        self.store.forget()
        return len(data)

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        """Write a small text."""
        return self.write_bytes(data.encode())

    def remove(self) -> None:
        """Remove the object, if it is there."""
        with contextlib.suppress(IncompleteError):
            attempt(str(self), lambda: self.store.files.rm_file(self.key), "cannot be removed")

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Folders are there when something lies in them."""

    def chmod(self, *_: Any, **__: Any) -> None:
        """The store says who may read it."""

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        """Read it by ranges, as a stream.

        Raises:
            UsageError: any other mode.
        """
        if mode != "rb":
            raise UsageError(self, f"is in an object store, where no file is opened to {mode!r}")
        return io.BufferedReader(_Stream(self), _BUFFER)

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        self.__fspath__()
        raise AssertionError("unreachable")

    rename = replace = unlink = rmdir = touch = symlink_to = hardlink_to = _refused


class _Stream(io.RawIOBase):
    """An object as a stream of ranged reads."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._size = path.stat().st_size
        self._file = reading.RemoteFile(str(path))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(0, min(len(target), self._size - self._at))]
        count = self._file.pread(target, self._at) if target else 0
        self._at += count
        return count
