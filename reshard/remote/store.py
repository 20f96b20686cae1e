"""One object store: its filesystem by fsspec, and what its folders list."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime
from functools import cache
from typing import Any

from reshard.errors import IncompleteError, UsageError
from reshard.remote.attempts import CREDENTIALS, attempt

Info = dict[str, Any]

_FRESH = 30.0  # seconds for which a listing is believed
# Two attempts a request are botocore's own, so that one lost part does not cost a whole upload.
_S3 = {
    "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 3}},
    "use_listings_cache": False,
}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3}
_TALKATIVE = ("gcsfs", "azure")
_TAGS = ("ETag", "etag", "generation", "md5Hash")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


class Store:
    """A filesystem of fsspec, and the listings of its folders."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.files = _filesystem(scheme)
        self._listed: dict[str, tuple[float, dict[str, Info]]] = {}
        self._lock = threading.Lock()

    def name_of(self, url: str) -> str:
        """What the filesystem calls it."""
        return str(self.files._strip_protocol(url))  # noqa: SLF001 - fsspec's own callers do so

    def listing(self, url: str) -> dict[str, Info]:
        """What lies directly in a folder, by name; of what is no folder, nothing."""
        with self._lock:
            when, found = self._listed.get(url, (0.0, {}))
        if when and time.monotonic() - when < _FRESH:
            return found
        name = self.name_of(url)
        try:
            infos = attempt(url, lambda: self.files.ls(name, detail=True, refresh=True))
        except IncompleteError:
            infos = []
        found = {}
        for info in infos:
            full = str(info["name"]).rstrip("/")
            if full != name.rstrip("/"):  # a folder's own marker, or the file that it is
                found[full.rsplit("/", 1)[-1]] = info
        with self._lock:
            self._listed[url] = time.monotonic(), found
        return found

    def info(self, url: str) -> Info | None:
        """Its size and kind, asked for now; None where there is nothing."""
        try:
            found: Info = attempt(url, lambda: self.files.info(self.name_of(url)))
        except IncompleteError:
            return None
        return found

    def find(self, url: str) -> Info | None:
        """As `info`, out of the listing of its folder where that is no whole bucket."""
        folder, _, name = url.rstrip("/").rpartition("/")
        if folder.count("/") < 3:
            return self.info(url)
        return self.listing(folder).get(name)

    def forget(self) -> None:
        """Believe no listing: something was written."""
        self.files.invalidate_cache()
        with self._lock:
            self._listed.clear()


def version_of(info: Info) -> tuple[str, ...]:
    """What is another once an object was written anew: its size and tag, or when that was.

    Nothing where its store says neither.
    """
    for keys in _TAGS, _TIMES:
        found = [str(info[key]) for key in keys if info.get(key)]
        if found:
            return str(info["size"]), *found
    return ()


def written_at(info: Info) -> int:
    """When it was written, in seconds, under the name that its filesystem has for that."""
    when = next((info[key] for key in _TIMES if info.get(key)), 0)
    if isinstance(when, str):
        try:
            when = datetime.fromisoformat(when.replace("Z", "+00:00"))
        except ValueError:
            return 0  # in a form of its own
    return int(when.timestamp() if isinstance(when, datetime) else when)


@cache
def store(scheme: str) -> Store:
    """The store of a URL's scheme.

    Raises:
        UsageError: its library is not installed, or none is known.
    """
    return Store(scheme)


def store_of(url: str) -> Store:
    """The store of a URL."""
    return store(url.partition("://")[0])


def _filesystem(scheme: str) -> Any:
    try:
        import fsspec

        for name in _TALKATIVE:  # what they log at every failed request, its error says
            logging.getLogger(name).addHandler(logging.NullHandler())
        return fsspec.filesystem(scheme, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        raise UsageError(
            f"{scheme}://",
            f"needs a library that is not here: {error}",
            "pip install reshard[remote]",
        ) from error
    except ValueError as error:
        if str(error).startswith("Protocol not known"):
            what = f"is no kind of URL that fsspec knows: {error}"
            raise UsageError(f"{scheme}://", what) from error
        raise UsageError(f"{scheme}://", f"cannot be opened: {error}", CREDENTIALS) from error
