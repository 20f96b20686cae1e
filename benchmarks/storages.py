"""Storages whose every read takes some time, and what was read from them."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contest import HERE

_FORM = struct.Struct("=4q")


class Counts:
    """Four numbers in a file that processes share: reads, bytes, reads in flight, and the most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("a+b") as file:
            file.truncate(_FORM.size)
            self._map = mmap.mmap(file.fileno(), _FORM.size)
        self._lock = threading.Lock()

    def get(self) -> tuple[int, int, int]:
        """Return the number of reads, their bytes, and the most that were in flight at once."""
        reads, nbytes, _, most = _FORM.unpack(self._map[:])
        return reads, nbytes, most

    def clear(self) -> None:
        """Set all numbers to zero."""
        self._map[:] = bytes(_FORM.size)

    @contextmanager
    def request(self, nbytes: int) -> Iterator[None]:
        """Count a read while it lasts; only one process of several may use this."""
        self._add(0, 0, 1)
        try:
            yield
        finally:
            self._add(1, nbytes, -1)

    def _add(self, reads: int, nbytes: int, now: int) -> None:
        with self._lock:
            old = _FORM.unpack(self._map[:])
            flying = old[2] + now
            new = (old[0] + reads, old[1] + nbytes, flying, max(old[3], flying))
            self._map[:] = _FORM.pack(*new)


@dataclass
class View:
    """A source as commands see it: its path or URL, and the variables that they need."""

    path: str
    variables: dict[str, str] = field(default_factory=dict)


class Shim:
    """A preloaded library that waits before each read: nothing is read ahead."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._library = place / "slow_reads.so"
        source = str(HERE / "slow_reads.c")
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), source, "-ldl"]
        subprocess.run(command, check=True)

    @contextmanager
    def serve(self, source: Path, seconds: float, counts: Counts) -> Iterator[View]:
        """Return how a command sees the files below ``source``."""
        variables = {
            "LD_PRELOAD": str(self._library),
            "SLOW_BELOW": str(source),
            "SLOW_SECONDS": str(seconds),
            "SLOW_COUNTS": str(counts.path),
        }
        yield View(str(source), variables)


class Mount:
    """A file system of FUSE that waits before each request; the kernel reads ahead.

    The kernel caches what it has read, so each command needs a mount of its own.
    """

    def __init__(self, place: Path) -> None:
        self._mount = place / "mount"
        self._mount.mkdir()

    @contextmanager
    def serve(self, source: Path, seconds: float, counts: Counts) -> Iterator[View]:
        """Mount ``source``, and return where."""
        command = [sys.executable, str(HERE / "slow_mount.py"), str(source), str(self._mount)]
        server = subprocess.Popen([*command, str(seconds), str(counts.path)])
        while not os.path.ismount(self._mount):
            if server.poll() is not None:
                raise SystemExit("the FUSE file system could not be mounted")
            time.sleep(0.05)
        try:
            yield View(str(self._mount))
        finally:
            subprocess.run(["umount", str(self._mount)], check=True)
            server.wait()


class Bucket:
    """An S3 store on this machine that waits before each answer."""

    def __init__(self, place: Path) -> None:
        self._root = place / "buckets"
        self._root.mkdir()
        self._port = place / "port"

    @contextmanager
    def serve(self, source: Path, seconds: float, counts: Counts) -> Iterator[View]:
        """Serve the files beside ``source``, and return its URL and where the store is."""
        (self._root / "bucket").unlink(missing_ok=True)
        (self._root / "bucket").symlink_to(source.parent)
        self._port.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "slow_store.py"), str(self._root), str(self._port)]
        server = subprocess.Popen([*command, str(seconds), str(counts.path)])
        while not (self._port.exists() and self._port.read_text()):
            if server.poll() is not None:
                raise SystemExit("the S3 store could not be started")
            time.sleep(0.05)
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port.read_text()}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        try:
            yield View(f"s3://bucket/{source.name}", variables)
        finally:
            server.terminate()
            server.wait()
