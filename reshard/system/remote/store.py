"""One object store: its fsspec filesystem and a cache of its folder listings."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from reshard.errors import IncompleteError, UsageError
from reshard.system import optional
from reshard.system.ranges import Range
from reshard.system.remote.attempts import (
    CREDENTIALS,
    PRECONDITION_FAILED,
    ChangedObjectError,
    attempt,
)
from reshard.system.versions import FileVersion

Info = dict[str, Any]

_BUCKET_SLASHES = 2  # of the URL of a bucket
_FRESH = 30.0  # seconds for which a cached listing is used
# botocore repeats a request itself, so that one lost part does not repeat a whole upload.
# After a 503, "adaptive" also sends fewer requests for a while.
_REQUESTS_AT_ONCE = 128
_S3 = {
    "config_kwargs": {
        "max_pool_connections": _REQUESTS_AT_ONCE,
        "retries": {"mode": "adaptive", "total_max_attempts": 3},
    },
    "max_concurrency": 1,  # of the parts of a file that is read whole, for which s3fs asks its size
    "use_listings_cache": False,
}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3}
_TALKATIVE = ("gcsfs", "azure")
_TAGS = ("ETag", "etag", "generation", "md5Hash", "blob_id")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


class Store:
    """An fsspec filesystem and the cached listings of its folders."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.files = _filesystem(scheme)
        self._listed: dict[str, tuple[float, dict[str, Info]]] = {}
        self._lock = threading.Lock()

    def name_of(self, url: str) -> str:
        """Return the filesystem's own name for a URL, without the scheme."""
        return str(self.files._strip_protocol(url))  # noqa: SLF001 - fsspec's own callers do so

    def list_children(self, url: str) -> dict[str, Info]:
        """Return the children of a folder by name; {} if it is not a folder."""
        children = self._get_listed(url)
        if children is not None:
            return children
        if not self._may_be_folder(url):
            return {}
        name = self.name_of(url)
        try:
            # fsspec may have a listing of its own, which does not expire
            # when another process writes.
            infos = attempt(url, lambda: self.files.ls(name, detail=True, refresh=True))
        except IncompleteError:
            infos = []
        children = {}
        for info in infos:
            full = str(info["name"]).rstrip("/")
            if full != name.rstrip("/"):  # skip a folder's own marker, or the file itself
                children[full.rsplit("/", 1)[-1]] = info
        with self._lock:
            self._listed[url] = time.monotonic(), children
        return children

    def _get_listed(self, url: str) -> dict[str, Info] | None:
        with self._lock:
            when, children = self._listed.get(url, (0.0, {}))
        return children if when and time.monotonic() - when < _FRESH else None

    def _may_be_folder(self, url: str) -> bool:
        """Return False if the listing of a folder above shows that there is no folder here."""
        folder, _, name = url.rstrip("/").rpartition("/")
        if folder.count("/") < _BUCKET_SLASHES:
            return True
        siblings = self._get_listed(folder)
        if siblings is None:
            return self._may_be_folder(folder)
        return name in siblings and siblings[name]["type"] == "directory"

    def info(self, url: str) -> Info | None:
        """Return size and type of an object by a new request; None if it does not exist."""
        try:
            info: Info = attempt(url, lambda: self.files.info(self.name_of(url)))
        except IncompleteError:
            return None
        return info

    def find(self, url: str) -> Info | None:
        """Return size and type of an object from its folder's listing.

        The user may not have the right to list a whole bucket, which can be long, too: what is
        directly in it is listed itself.
        """
        folder, _, name = url.rstrip("/").rpartition("/")
        if folder.count("/") > _BUCKET_SLASHES or self._get_listed(folder) is not None:
            return self.list_children(folder).get(name)
        if self.list_children(url):
            return {"name": self.name_of(url), "size": 0, "type": "directory"}
        return self.info(url)

    def pins(self, version: FileVersion) -> bool:
        """Return whether a read of a version fails if the object was replaced."""
        return self.scheme in S3_SCHEMES and version.condition != ""

    def read_ranges(
        self, ranges: Sequence[Range], versions: Sequence[FileVersion]
    ) -> list[bytes | Exception]:
        """Return the bytes of each range, which are fetched concurrently, or why they are missing.

        Args:
            versions: of the object of each range; see `pins`.
        """
        names = [self.name_of(url) for url, _, _ in ranges]
        starts = [start for _, start, _ in ranges]
        stops = [start + nbytes for _, start, nbytes in ranges]
        read = _READS.get(self.scheme)
        results: list[bytes | Exception]
        if read is None:
            results = self.files.cat_ranges(names, starts, stops, on_error="return")
            return results
        from fsspec import asyn

        async def read_all() -> list[bytes | Exception]:
            conditions = [version.condition for version in versions]
            limit = asyncio.Semaphore(_REQUESTS_AT_ONCE)

            async def read_one(*arguments: Any) -> bytes:
                async with limit:
                    return await read(self.files, *arguments)

            reads = map(read_one, names, starts, stops, conditions)
            return await asyncio.gather(*reads, return_exceptions=True)  # type: ignore[return-value]

        results = asyn.sync(self.files.loop, read_all)
        return results

    def forget(self) -> None:
        """Drop all cached listings, because something was written."""
        self.files.invalidate_cache()
        with self._lock:
            self._listed.clear()


async def _read_s3(files: Any, name: str, start: int, stop: int, etag: str) -> bytes:
    bucket, key, version = files.split_path(name)
    conditions = {"IfMatch": etag} if etag else {}
    chosen = {"VersionId": version} if version else {}
    span = f"bytes={start}-{stop - 1}"
    try:
        answer = await files._call_s3(  # noqa: SLF001 - the public method is not asynchronous
            "get_object", Bucket=bucket, Key=key, Range=span, **chosen, **conditions
        )
    except OSError as error:
        found = getattr(error.__cause__, "response", {})
        if found.get("ResponseMetadata", {}).get("HTTPStatusCode") == PRECONDITION_FAILED:
            raise ChangedObjectError("the object was replaced") from error
        raise
    try:
        # Some servers that are compatible with S3 ignore the condition.
        if etag and answer.get("ETag", etag) != etag:
            raise ChangedObjectError("the object was replaced")
        return bytes(await answer["Body"].read())
    finally:
        answer["Body"].close()


async def _read_google(files: Any, name: str, start: int, stop: int, generation: str) -> bytes:
    condition = f"&ifGenerationMatch={generation}" if generation else ""
    span = {"Range": f"bytes={start}-{stop - 1}"}
    try:
        _, data = await files._call("GET", files.url(name) + condition, headers=span)  # noqa: SLF001 - as gcsfs's `cat_file`
    except FileExistsError as error:  # gcsfs says so of every condition that is not met
        raise ChangedObjectError("the object was replaced") from error
    return bytes(data)


S3_SCHEMES = ("s3", "s3a")
_READS = {**dict.fromkeys(S3_SCHEMES, _read_s3), "gs": _read_google, "gcs": _read_google}
"""URL scheme -> how to read a range of one version of an object."""


def find_version(info: Info) -> FileVersion:
    """Return the version of an object."""
    seconds = get_modification_time(info)
    condition = str(info.get("generation") or info.get("ETag") or "")
    return FileVersion(info["size"], seconds * 10**9, tags=get_version(info), condition=condition)


def get_version(info: Info) -> tuple[str, ...]:
    """Return values that change whenever an object is rewritten: size and tags, or size and times.

    The result is empty if the store reports neither tags nor times.
    """
    for keys in _TAGS, _TIMES:
        values = [str(info[key]) for key in keys if info.get(key)]
        if values:
            return str(info["size"]), *values
    return ()


def get_modification_time(info: Info) -> int:
    """Return the modification time in seconds; each filesystem has its own key for it."""
    when = next((info[key] for key in _TIMES if info.get(key)), 0)
    if isinstance(when, str):
        try:
            when = datetime.fromisoformat(when.replace("Z", "+00:00"))
        except ValueError:
            return 0  # an unknown time format
    return int(when.timestamp() if isinstance(when, datetime) else when)


@cache
def get_store(scheme: str) -> Store:
    """Return the store of a URL scheme; the result is cached.

    Raises:
        UsageError: the library for the scheme is not installed, or fsspec knows none.
    """
    return Store(scheme)


def find_store(url: str) -> Store:
    """Return the store of a URL."""
    return get_store(url.partition("://")[0])


_LIBRARIES = {  # beside fsspec, whose message names those of other schemes
    **dict.fromkeys(("s3", "s3a"), ("s3fs",)),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs",)),
    **dict.fromkeys(("az", "abfs"), ("adlfs",)),
    "hf": ("huggingface_hub",),
}


def _filesystem(scheme: str) -> Any:
    try:
        import fsspec

        for name in _TALKATIVE:  # they log every failed request, which the error reports anyway
            logging.getLogger(name).addHandler(logging.NullHandler())
        return fsspec.filesystem(scheme, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        url, packages = f"{scheme}://", ("fsspec", *_LIBRARIES.get(scheme, ()))
        for package in packages:
            optional.require(package, url, optional.install(*packages))
        problem = f"needs a library that is not installed: {error}"
        raise UsageError(url, problem, optional.install(*packages)) from error
    except ValueError as error:
        if str(error).startswith("Protocol not known"):
            what = f"is not a URL scheme that fsspec supports: {error}"
            raise UsageError(f"{scheme}://", what) from error
        raise UsageError(f"{scheme}://", f"cannot be opened: {error}", CREDENTIALS) from error
