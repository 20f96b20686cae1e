"""A file system of fsspec whose files are those that `merge` or `split` would write.

    import fsspec

    files = fsspec.filesystem("reshard", fo="run/")          # a Hugging Face model
    files.cat_file("config.json")
    fsspec.open("reshard://model.safetensors::/path/of/run")  # as a chained URL

Nothing is written: every byte is computed when it is read. An entry point of this package makes the
protocol known to fsspec.
"""

from __future__ import annotations

import io
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

import fsspec

from reshard.commands.open_files import FilesOptions, open_files
from reshard.errors import UsageError

__all__ = ["CheckpointFileSystem"]


class CheckpointFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc] # it has no types
    """The files of one checkpoint in another layout, read-only.

    Args:
        fo: the checkpoint: a path or URL as for `reshard.open`.
        target_protocol: the protocol of ``fo`` in a chained URL.
        target_options: not used; object stores read their credentials from the environment.
        options: those of `reshard.open_files`: ``to``, ``world_size``, ``dtype``, ``tag``, ...

    Raises:
        ReshardError: the checkpoint cannot be read, trusted or laid out.
    """

    protocol = "reshard"
    root_marker = ""
    cachable = False  # the files of the checkpoint stay open as long as an instance is used

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(fo=fo, target_protocol=target_protocol, target_options=target_options)
        if not fo:
            raise UsageError(
                "reshard://",
                "does not name a checkpoint",
                'pass fo="run/", or chain the URL: reshard://FILE::/path/of/run',
            )
        is_local = target_protocol in (None, "file", "local")
        source = fo if is_local or "://" in fo else f"{target_protocol}://{fo}"
        self._stack = ExitStack()
        self._files = self._stack.enter_context(open_files(source, FilesOptions(**options)))

    def close(self) -> None:
        """Close the files of the checkpoint."""
        self._stack.close()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT002 - as fsspec declares it
        """Return the names in a directory, or the result of `info` for each.

        Raises:
            FileNotFoundError: there is no such file or directory.
        """
        path = self._strip_protocol(path)
        if path in self._files:
            names = [path]
        else:
            prefix = f"{path}/" if path else ""
            inside = (name for name in self._files if name.startswith(prefix))
            heads = (name[len(prefix) :].partition("/")[0] for name in inside)
            names = list(dict.fromkeys(f"{prefix}{head}" for head in heads))
        if not names:
            raise FileNotFoundError(path)
        return [self.info(name) for name in names] if detail else names

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name, size and type of a file or directory.

        The time and the tag of a file change with the checkpoint, and so do fsspec's `ukey` and
        `checksum`, which are computed from them.

        Raises:
            FileNotFoundError: there is no such file or directory.
        """
        path = self._strip_protocol(path)
        if path in self._files:
            return {
                "name": path,
                "size": self._files.nbytes(path),
                "type": "file",
                "mtime": self._files.changed_ns / 1e9,
                "ETag": self._files.compute_tag(path).hex(),
            }
        if path and not any(name.startswith(f"{path}/") for name in self._files):
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def modified(self, path: str) -> datetime:
        """Return when the last of the checkpoint's files was changed.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise UsageError(path, f"cannot be opened with mode {mode!r}: it is read-only")
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files.open(path)
