"""Mount a directory with FUSE, so that each request to it waits before it is answered.

    python benchmarks/slow_mount.py DIRECTORY MOUNT SECONDS COUNTS

It needs ``/dev/fuse``, libfuse and ``pip install reshard[mount]``. The kernel caches and reads
ahead, as it does for NFS and Lustre. ``storages.py`` says what COUNTS holds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy
from storages import Counts


class SlowFiles(mfusepy.Operations):
    """The files of a directory, each request to which waits before it is answered."""

    use_ns = True

    def __init__(self, root: str, seconds: float, counts: Counts) -> None:
        self._root = root
        self._seconds = seconds
        self._counts = counts

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:  # noqa: ARG002
        """Let the kernel have as many requests in flight as a client of Lustre or NFS has."""
        conn_info.max_background = 64

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Return the attributes of a file."""
        found = os.lstat(self._root + path)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        return {name: getattr(found, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:  # noqa: ARG002
        """Return the names in a directory."""
        return [".", "..", *(each.name for each in Path(self._root + path).iterdir())]

    def open(self, path: str, flags: int) -> int:  # noqa: ARG002
        """Open a file."""
        time.sleep(self._seconds)
        return os.open(self._root + path, os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:  # noqa: ARG002
        """Return bytes of a file."""
        with self._counts.request(size):
            time.sleep(self._seconds)
            return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> None:  # noqa: ARG002
        """Close a file."""
        os.close(fh)


if __name__ == "__main__":
    root, mount, seconds, counts = sys.argv[1:]
    files = SlowFiles(root, float(seconds), Counts(Path(counts)))
    mfusepy.FUSE(files, mount, foreground=True, kernel_cache=True, max_threads=64)
