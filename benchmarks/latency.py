"""Measure `reshard inspect` of a checkpoint on a file system whose every request takes some time.

    python benchmarks/latency.py CHECKPOINT [MILLISECONDS]

The directory is mounted with FUSE, which needs ``/dev/fuse``, ``fusermount`` and ``pip install
reshard[mount]``. The kernel caches what it has read, as it does for NFS and Lustre, so each round
mounts anew. Prints the wall time and the number of reads that reached the file system.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mfusepy

ROUNDS = 3


class SlowFiles(mfusepy.Operations):
    """The files of a directory, each request to which waits before it is answered."""

    use_ns = True

    def __init__(self, root: str, seconds: float, log: str) -> None:
        self._root = root
        self._seconds = seconds
        self._log = log
        self._reads = 0

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
        time.sleep(self._seconds)
        self._reads += 1
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> None:  # noqa: ARG002
        """Close a file."""
        os.close(fh)

    def destroy(self, path: str) -> None:  # noqa: ARG002
        """Write the number of reads."""
        Path(self._log).write_text(str(self._reads))


def serve(root: str, mount: str, seconds: float, log: str) -> None:
    """Mount a directory until it is unmounted."""
    files = SlowFiles(root, seconds, log)
    mfusepy.FUSE(files, mount, foreground=True, kernel_cache=True, max_background=64)


def main(root: str, milliseconds: float) -> None:
    with tempfile.TemporaryDirectory() as place:
        mount, log = Path(place, "mount"), Path(place, "reads")
        mount.mkdir()
        for _ in range(ROUNDS):
            command = [sys.executable, __file__, "--serve", root, str(mount)]
            server = subprocess.Popen([*command, str(milliseconds / 1000), str(log)])
            while not os.path.ismount(mount) and server.poll() is None:
                time.sleep(0.05)
            began = time.perf_counter()
            inspect = [sys.executable, "-m", "reshard", "inspect", str(mount)]
            subprocess.run(inspect, stdout=subprocess.DEVNULL, check=True)
            seconds = time.perf_counter() - began
            subprocess.run(["fusermount", "-u", str(mount)], check=True)
            server.wait()
            print(f"{seconds:.2f} s, {log.read_text()} reads", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:4], float(sys.argv[4]), sys.argv[5])
    else:
        main(str(Path(sys.argv[1]).resolve()), float((sys.argv[2:] or ["2"])[0]))
