"""Files of this machine sent into an object store, in parts, and read back there."""

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
_MOST_PARTS = 9_000  # S3 takes ten thousand
_STEP = 1 << 20  # Google takes parts of whole steps only
_PARTS_AT_ONCE = 4
_REMOVALS_AT_ONCE = 16
_BULK = ("s3", "s3a")
_MAGIC = frozenset("*?[")  # which fsspec takes for a pattern where it is given a list
_READ_BACK = 4 << 20  # bytes at a time
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs")  # stores whose first name must be there


class StoppedError(ReshardError):
    """An upload ended early, for the run ends: what ended it has been told."""


def check_bucket(destination: RemotePath) -> None:
    """Refuse a destination in a bucket that is not there.

    Raises:
        UsageError: it is not.
    """
    store = destination.store
    if len(destination.parts) < 3:
        raise UsageError(destination, "is a bucket", "name what to write in it")
    bucket = f"{store.scheme}://{destination.parts[1]}"
    if store.scheme in _BUCKETS and store.info(bucket) is None:
        raise UsageError(destination, f"there is no bucket {bucket}", "create it first")


def upload(made: Path, destination: RemotePath, stop: threading.Event) -> None:
    """Send a file of this machine, in parts and again where that fails.

    Args:
        stop: once set, no further part is sent.

    Raises:
        ReshardError: it cannot be written.
        StoppedError: it was stopped.
    """
    store, url = destination.store, str(destination)
    nbytes = made.stat().st_size
    options = {
        "chunksize": max(_PART, -(-nbytes // _MOST_PARTS // _STEP) * _STEP),
        "max_concurrency": _PARTS_AT_ONCE,
        "callback": _until(stop, url),
    }
    put = getattr(store.files, "_put_file", store.files.put_file)
    known = inspect.signature(put).parameters
    options = {name: value for name, value in options.items() if name in known}

    def send() -> None:
        store.files.put_file(str(made), store.name_of(url), **options)
        found = store.info(url)
        if found is None or found["size"] != nbytes:
            raise OSError(f"{found and found['size']} of {nbytes} bytes arrived")

    attempt(url, send, "cannot be written")
    store.forget()


def check_read_back(made: Path, sent: RemotePath, stop: threading.Event) -> None:
    """Read an uploaded file back, and compare it with the one that was sent.

    Raises:
        StoppedError: it was stopped.
        DifferentError: the store holds something else.
    """
    nbytes = made.stat().st_size
    with made.open("rb") as file:
        for start in range(0, nbytes, _READ_BACK):
            _check_going(stop, str(sent))
            piece = file.read(_READ_BACK)
            if piece != fetch(sent.store, str(sent), start, len(piece)):
                raise DifferentError(
                    sent,
                    f"bytes {start} to {start + len(piece)} read back differ from those sent",
                    "the store or the way to it is at fault: nothing was kept",
                )


def _until(stop: threading.Event, url: str) -> Any:
    """What a library calls after every part that it has sent."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"stop": lambda *_, **__: _check_going(stop, url)})


def _check_going(stop: threading.Event, url: str) -> None:
    if stop.is_set():
        raise StoppedError(url, "was not sent to its end: the run ended")


def sizes_below(place: RemotePath) -> dict[str, int]:
    """Names of all objects below a prefix, with their sizes, asked for now."""
    store = place.store
    store.forget()
    key = place.key.rstrip("/")
    found = attempt(str(place), lambda: store.files.find(key, detail=True))
    return {
        str(name)[len(key) + 1 :]: info["size"]
        for name, info in found.items()
        if str(name).startswith(f"{key}/")
    }


def remove(paths: Sequence[RemotePath]) -> None:
    """Remove objects, those that are there: S3 many by one request."""
    bulk = {path for path in paths if path.store.scheme in _BULK and not _MAGIC & {*path.key}}
    if bulk:
        first = next(iter(bulk))
        keys = [path.key for path in bulk]
        attempt(str(first.parent), lambda: first.store.files.rm(keys), "cannot be removed")
    rest = [path for path in paths if path not in bulk]
    threads.parallel_map(rest, RemotePath.remove, _REMOVALS_AT_ONCE)


def abort_uploads(place: RemotePath) -> None:
    """S3 keeps, and charges for, the parts of an upload that was never ended.

    Not every store that speaks its language can say which those are, nor may everybody ask.
    """
    files = place.store.files
    if not hasattr(files, "abort_mpu"):
        return
    bucket, _, prefix = place.key.partition("/")
    with contextlib.suppress(ReshardError):
        listed = attempt(
            str(place),
            lambda: files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/"),
        )
        for begun in listed.get("Uploads", ()):
            abort = partial(files.abort_mpu, bucket, begun["Key"], begun["UploadId"])
            attempt(str(place), abort)
