"""One object store: its filesystem by fsspec, requests made again, and what its folders list."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from reshard.errors import IncompleteError, ReshardError, UsageError

T = TypeVar("T")
Info = dict[str, Any]

ATTEMPTS = 6  # of one request
FIRST_WAIT = 0.3  # seconds before the second attempt; each later wait is twice as long
_LONGEST_WAIT = 10.0
_FRESH = 30.0  # seconds for which a listing is believed
# Two attempts a request are botocore's own, so that one lost part does not cost a whole upload.
_S3 = {
    "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 3}},
    "use_listings_cache": False,
}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3}
_PATIENT = {"gs": 2, "gcs": 2, "az": 2, "abfs": 2}  # their libraries wait longer each time
_FINAL = (IsADirectoryError, NotADirectoryError)
_REFUSED = (401, 403)
_TALKATIVE = ("gcsfs", "azure")
_LIBRARIES = frozenset(
    "adlfs aiobotocore aiohttp azure botocore fsspec gcsfs google requests s3fs urllib3".split()
)
_TAGS = ("ETag", "etag", "generation", "md5Hash")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
_HOPELESS = frozenset(
    "NoCredentialsError PartialCredentialsError DefaultCredentialsError"
    " ParamValidationError".split()
)
_CREDENTIALS = "give the credentials where its library looks for them (environment, ~/.aws, ...)"


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
        raise UsageError(f"{scheme}://", f"cannot be opened: {error}", _CREDENTIALS) from error


def attempt(url: str, request: Callable[[], T], what: str = "cannot be reached") -> T:
    """Make a request, and again where another attempt may succeed.

    Raises:
        IncompleteError: there is no such object.
        ReshardError: it is refused, or every attempt failed.
    """
    most = min(ATTEMPTS, _PATIENT.get(url.partition("://")[0], ATTEMPTS))
    for number in range(most):
        try:
            return request()
        except Exception as error:
            if _status(error) == 404:
                raise IncompleteError(url, "is not there") from error
            if not _is_of_others(error):
                raise
            if _is_final(error):
                said = f"{what}: {_said(error)}"
                raise ReshardError(url, said, _remedy(error)) from _outside(error)
            if number == most - 1:
                raise ReshardError(
                    url,
                    f"{what}, in {most} attempts: {_said(error)}",
                    "look at the network and the store, then run the same command again",
                ) from _outside(error)
            wait = min(FIRST_WAIT * 2**number, _LONGEST_WAIT)
            time.sleep(wait * random.uniform(0.5, 1))  # noqa: S311 - so that many do not come at once
    raise AssertionError("unreachable")


def _is_of_others(error: Exception) -> bool:
    """Whether it is the network's or the server's, and no bug of ours."""
    outside = isinstance(error, (OSError, EOFError))
    return outside or type(error).__module__.split(".")[0] in _LIBRARIES


def _outside(error: Exception) -> OSError:
    """An error of a library as one of the system, after which another run may succeed."""
    if isinstance(error, OSError):
        return error
    outside = ConnectionError(_said(error))
    outside.__cause__ = error
    return outside


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


def _status(error: Exception) -> int | None:
    """What the server answered with, as far as its library lets that be seen."""
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden:"):  # gcsfs
        return 403
    said = getattr(error, "status_code", None) or getattr(error, "code", None)  # azure; gcsfs
    return int(str(said)) if str(said).isdigit() else None


def _is_final(error: Exception) -> bool:
    """Whether another attempt cannot mend it."""
    hopeless = type(error).__name__ in _HOPELESS
    return hopeless or isinstance(error, _FINAL) or _status(error) in _REFUSED


def _remedy(error: Exception) -> str:
    refused = _status(error) in _REFUSED
    return _CREDENTIALS if refused or "Credentials" in type(error).__name__ else ""
