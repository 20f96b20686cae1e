"""Several objects of a store: listing them with their sizes, and removing them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from reshard.errors import ReshardError, UsageError
from reshard.system import threads
from reshard.system.remote.attempts import attempt
from reshard.system.remote.path import RemotePath

_REMOVALS_AT_ONCE = 16
_BULK = ("s3", "s3a")
_MAGIC = frozenset("*?[")  # fsspec treats a key with one of them in a list as a pattern
# Stores whose buckets must exist before an upload.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs")


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
