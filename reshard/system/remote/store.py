"""One object store: its fsspec filesystem and a cache of its folder listings."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime
from functools import cache
from typing import Any

from reshard.errors import IncompleteError, UsageError
from reshard.system.remote.attempts import CREDENTIALS, attempt

Info = dict[str, Any]

_FRESH = 30.0  # seconds for which a cached listing is used
# botocore repeats a request itself, so that one lost part does not repeat a whole upload.
_S3 = {
    "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 3}},
    "use_listings_cache": False,
}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3}
_TALKATIVE = ("gcsfs", "azure")
_TAGS = ("ETag", "etag", "generation", "md5Hash")
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
        with self._lock:
            when, children = self._listed.get(url, (0.0, {}))
        if when and time.monotonic() - when < _FRESH:
            return children
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

    def info(self, url: str) -> Info | None:
        """Return size and type of an object by a new request; None if it does not exist."""
        try:
            info: Info = attempt(url, lambda: self.files.info(self.name_of(url)))
        except IncompleteError:
            return None
        return info

    def find(self, url: str) -> Info | None:
        """Return size and type of an object from its folder's listing, unless that is a bucket."""
        folder, _, name = url.rstrip("/").rpartition("/")
        if folder.count("/") < 3:
            return self.info(url)
        return self.list_children(folder).get(name)

    def forget(self) -> None:
        """Drop all cached listings, because something was written."""
        self.files.invalidate_cache()
        with self._lock:
            self._listed.clear()


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


def _filesystem(scheme: str) -> Any:
    try:
        import fsspec

        for name in _TALKATIVE:  # they log every failed request, which the error reports anyway
            logging.getLogger(name).addHandler(logging.NullHandler())
        return fsspec.filesystem(scheme, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        raise UsageError(
            f"{scheme}://",
            f"needs a library that is not installed: {error}",
            "pip install reshard[remote]",
        ) from error
    except ValueError as error:
        if str(error).startswith("Protocol not known"):
            what = f"is not a URL scheme that fsspec supports: {error}"
            raise UsageError(f"{scheme}://", what) from error
        raise UsageError(f"{scheme}://", f"cannot be opened: {error}", CREDENTIALS) from error
