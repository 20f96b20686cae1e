"""Uploads of local files to an object store in parts, reading back, and removal of objects."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reshard import threads
from reshard.errors import DifferentError, ReshardError, UsageError
from reshard.remote.attempts import attempt
from reshard.remote.path import RemotePath
from reshard.remote.reading import fetch

_PART = 16 << 20  # bytes of one part of an upload
_MOST_PARTS = 9_000  # S3 accepts 10,000
_STEP = 1 << 20  # bytes; Google accepts only parts of a multiple of 256 KiB
_PARTS_AT_ONCE = 4
_REMOVALS_AT_ONCE = 16
_BULK = ("s3", "s3a")
_MAGIC = frozenset("*?[")  # fsspec treats a key with one of them in a list as a pattern
_READ_BACK = 4 << 20  # bytes at a time
_BUCKETS = (
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
)  # stores whose buckets must exist before an upload


class StoppedError(ReshardError):
    """An upload was stopped because the run ends; the run reports its own error."""


def check_bucket(destination: RemotePath) -> None:
    """Check that the destination is inside an existing bucket.

    Raises:
        UsageError: the destination is a bucket, or its bucket does not exist.
    """
    store = destination.store
    if len(destination.parts) < 3:
        raise UsageError(destination, "is a bucket", "add a name inside the bucket")
    bucket = f"{store.scheme}://{destination.parts[1]}"
    if store.scheme in _BUCKETS and store.info(bucket) is None:
        raise UsageError(destination, f"there is no bucket {bucket}", "create it first")


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
    options = {
        "chunksize": max(_PART, -(-nbytes // _MOST_PARTS // _STEP) * _STEP),
        "max_concurrency": _PARTS_AT_ONCE,
        "callback": _build_stop_callback(stop, url),
    }
    put = getattr(store.files, "_put_file", store.files.put_file)
    known = inspect.signature(put).parameters  # not every fsspec filesystem has all options
    options = {name: value for name, value in options.items() if name in known}

    def send() -> None:
        store.files.put_file(str(file_path), store.name_of(url), **options)
        info = store.info(url)
        if info is None or info["size"] != nbytes:
            raise OSError(f"only {info['size'] if info else 0} of {nbytes} bytes were stored")

    attempt(url, send, "cannot be written")
    store.forget()


def check_read_back(file_path: Path, remote_path: RemotePath, stop: threading.Event) -> None:
    """Read an uploaded file back and compare it with the local one.

    Raises:
        StoppedError: `stop` was set.
        DifferentError: the object differs from the local file.
    """
    nbytes = file_path.stat().st_size
    with file_path.open("rb") as file:
        for start in range(0, nbytes, _READ_BACK):
            _check_not_stopped(stop, str(remote_path))
            piece = file.read(_READ_BACK)
            if piece != fetch(remote_path.store, str(remote_path), start, len(piece)):
                raise DifferentError(
                    remote_path,
                    f"bytes {start} to {start + len(piece)} differ from what was sent when they"
                    " are read back",
                    "check the store and the network; the output was discarded",
                )


def _build_stop_callback(stop: threading.Event, url: str) -> Any:
    """Return the callback that fsspec calls after every part; it raises once `stop` is set."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"stop": lambda *_, **__: _check_not_stopped(stop, url)})


def _check_not_stopped(stop: threading.Event, url: str) -> None:
    if stop.is_set():
        raise StoppedError(url, "was not uploaded completely, because the run ended")


def list_sizes(folder: RemotePath) -> dict[str, int]:
    """Return the names of all objects below a folder, with their sizes, by a new request."""
    store = folder.store
    store.forget()
    key = folder.key.rstrip("/")
    infos = attempt(str(folder), lambda: store.files.find(key, detail=True))
    return {
        str(name)[len(key) + 1 :]: info["size"]
        for name, info in infos.items()
        if str(name).startswith(f"{key}/")
    }


def remove(paths: Sequence[RemotePath]) -> None:
    """Remove those of the given objects that exist; on S3, many with one request."""
    bulk = {path for path in paths if path.store.scheme in _BULK and not _MAGIC & {*path.key}}
    if bulk:
        first = next(iter(bulk))
        keys = [path.key for path in bulk]
        attempt(str(first.parent), lambda: first.store.files.rm(keys), "cannot be removed")
    rest = [path for path in paths if path not in bulk]
    threads.parallel_map(rest, RemotePath.remove, _REMOVALS_AT_ONCE)


def abort_uploads(folder: RemotePath) -> None:
    """Abort unfinished multipart uploads below a folder: S3 keeps and charges for their parts.

    Failures are ignored, because not every S3-compatible store can list unfinished uploads, and not
    every user may list them.
    """
    files = folder.store.files
    if not hasattr(files, "abort_mpu"):
        return
    bucket, _, prefix = folder.key.partition("/")
    with contextlib.suppress(ReshardError):
        listed = attempt(
            str(folder),
            lambda: files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/"),
        )
        for pending in listed.get("Uploads", ()):
            abort = partial(files.abort_mpu, bucket, pending["Key"], pending["UploadId"])
            attempt(str(folder), abort)
