"""Uploads of finished output files to an object store, in the background, and reading them back."""

from __future__ import annotations

import inspect
import shutil
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from reshard.core.manifest import OutputFile
from reshard.engine.output.files import OutputFiles, check_read_back
from reshard.errors import ReshardError, ResourceError
from reshard.system.remote.attempts import attempt
from reshard.system.remote.parts import upload_in_parts
from reshard.system.remote.path import RemotePath
from reshard.system.remote.reading import RemoteFile
from reshard.system.remote.store import S3_SCHEMES, find_version
from reshard.system.threads import ThreadGroup

_PART = 8 << 20  # bytes of one part of an upload
_MOST_PARTS = 9_000  # S3 accepts 10,000
_STEP = 1 << 20  # bytes; Google accepts only parts of a multiple of 256 KiB
_PARTS_AT_ONCE = 4
_READ_BACK = 4 << 20  # bytes of one request
_READ_BACK_AT_ONCE = 8
_FILES_AT_ONCE = 8


class StoppedError(ReshardError):
    """An upload was stopped because the run ends; the run reports its own error."""


class Uploads(ThreadGroup):
    """Threads that upload files; the local files together stay below twice the largest one.

    Args:
        local: the finished files.
        directory: where to upload them.
        verify: whether to read every file back.
    """

    def __init__(self, local: OutputFiles, directory: RemotePath, *, verify: bool) -> None:
        super().__init__()
        self._local = local
        self._directory = directory
        self._verify = verify
        self._room = 0
        self._pending: dict[str, int] = {}
        self._stop = threading.Event()

    def __exit__(self, *error: object) -> None:
        """Stop the uploads after an error instead of completing them."""
        if error[0] is not None:
            self._stop.set()
        super().__exit__(*error)

    def reserve(self, files: Collection[OutputFile]) -> None:
        """Check that the local disk has room for two files of the largest size.

        Raises:
            ResourceError: there is less room.
        """
        self._room = 2 * max((file.nbytes for file in files), default=0)
        free = shutil.disk_usage(self._local.directory).free
        if free < self._room:
            raise ResourceError(
                self._local.directory,
                f"{self._room:,} bytes are needed for two output files, but only {free:,} are free",
                "free some space, set TMPDIR to a larger disk, or choose smaller output files",
            )

    def make_room(self, file: OutputFile) -> None:
        """Wait until one more file fits on the local disk."""
        while self._pending and sum(self._pending.values()) + file.nbytes > self._room:
            self._wait()

    def send(self, file: OutputFile, on_arrival: Callable[[], None]) -> None:
        """Upload a finished file in the background, then call `on_arrival` and remove the file."""
        while len(self._pending) >= _FILES_AT_ONCE:
            self._wait()
        self._pending[file.name] = file.nbytes
        self.start(partial(self._send, file, on_arrival), name=file.name)

    def finish(self) -> None:
        """Wait for all uploads."""
        while self._pending:
            self._wait()

    def _send(self, file: OutputFile, on_arrival: Callable[[], None]) -> None:
        self._local.forget(file.name)
        local_path, remote_path = self._local.directory / file.name, self._directory / file.name
        upload(local_path, remote_path, self._stop)
        if self._verify:
            check_uploaded(local_path, remote_path, self._stop)
        # The receipt comes after the check, so that it never stands for a file that arrived wrong.
        on_arrival()
        local_path.unlink()

    def _wait(self) -> None:
        del self._pending[self.wait()]


def upload(file_path: Path, destination: RemotePath, stop: threading.Event) -> None:
    """Upload a local file in parts, repeating requests that fail.

    Args:
        file_path: the local file.
        destination: the object to write.
        stop: once it is set, no further part is sent.

    Raises:
        ReshardError: the object cannot be written.
        StoppedError: `stop` was set.
    """
    store, url = destination.store, str(destination)
    nbytes = file_path.stat().st_size
    part_nbytes = max(_PART, -(-nbytes // _MOST_PARTS // _STEP) * _STEP)
    options = {
        "chunksize": part_nbytes,
        "max_concurrency": _PARTS_AT_ONCE,
        "callback": _build_stop_callback(stop, url),
    }
    put = getattr(store.files, "_put_file", store.files.put_file)
    known = inspect.signature(put).parameters  # not every fsspec filesystem has all options
    options = {name: value for name, value in options.items() if name in known}

    def send() -> None:
        if store.scheme in S3_SCHEMES and nbytes > part_nbytes:
            check = partial(_check_not_stopped, stop, url)
            upload_in_parts(store, file_path, url, part_nbytes, check)
        else:
            store.files.put_file(str(file_path), store.name_of(url), **options)
        info = store.info(url)
        if info is None or info["size"] != nbytes:
            raise OSError(f"only {info['size'] if info else 0} of {nbytes} bytes were stored")

    attempt(url, send, "cannot be written")
    store.forget()


def check_uploaded(file_path: Path, remote_path: RemotePath, stop: threading.Event) -> None:
    """Read an uploaded file back and compare it with the local one.

    Raises:
        StoppedError: `stop` was set.
        DifferentError: the object differs from the local file.
    """
    nbytes, url = file_path.stat().st_size, str(remote_path)
    info = remote_path.store.info(url)
    uploaded = RemoteFile(url, find_version(info) if info else None)
    with file_path.open("rb") as file:
        for first in range(0, nbytes, _READ_BACK * _READ_BACK_AT_ONCE):
            _check_not_stopped(stop, url)
            stop_at = min(first + _READ_BACK * _READ_BACK_AT_ONCE, nbytes)
            starts = range(first, stop_at, _READ_BACK)
            ranges = [(start, min(_READ_BACK, stop_at - start)) for start in starts]
            for (start, size), stored in zip(ranges, uploaded.fetch_all(ranges), strict=True):
                piece = file.read(size)
                check_read_back(url, start, piece, stored, "the store and the network")


def _build_stop_callback(stop: threading.Event, url: str) -> Any:
    from fsspec.callbacks import Callback

    return Callback(hooks={"stop": lambda *_, **__: _check_not_stopped(stop, url)})


def _check_not_stopped(stop: threading.Event, url: str) -> None:
    if stop.is_set():
        raise StoppedError(url, "was not uploaded completely, because the run ended")
