"""One object store: its filesystem by fsspec, requests made again, and what its folders list."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
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
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_LIBRARIES = frozenset(
    "adlfs aiobotocore aiohttp azure botocore fsspec gcsfs google requests s3fs urllib3".split()
)
_HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError")


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

        return fsspec.filesystem(scheme, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        raise UsageError(
            f"{scheme}://",
            f"needs a library that is not here: {error}",
            "pip install reshard[remote]",
        ) from error
    except ValueError as error:
        raise UsageError(f"{scheme}://", f"is no kind of URL that fsspec knows: {error}") from error


def attempt(url: str, request: Callable[[], T], what: str = "cannot be reached") -> T:
    """Make a request, and again where another attempt may succeed.

    Raises:
        IncompleteError: there is no such object.
        ReshardError: it is refused, or every attempt failed.
    """
    for number in range(ATTEMPTS):
        try:
            return request()
        except FileNotFoundError as error:
            raise IncompleteError(url, "is not there") from error
        except Exception as error:
            if not _is_of_others(error):
                raise
            if isinstance(error, _FINAL) or type(error).__name__ in _HOPELESS:
                raise ReshardError(url, f"{what}: {_said(error)}", _remedy(error)) from error
            if number == ATTEMPTS - 1:
                raise ReshardError(
                    url,
                    f"{what}, in {ATTEMPTS} attempts: {_said(error)}",
                    "look at the network and the store, then run the same command again",
                ) from error
            wait = min(FIRST_WAIT * 2**number, _LONGEST_WAIT)
            time.sleep(wait * random.uniform(0.5, 1))  # noqa: S311 - so that many do not come at once
    raise AssertionError("unreachable")


def _is_of_others(error: Exception) -> bool:
    """Whether it is the network's or the server's, and no bug of ours."""
    outside = isinstance(error, (OSError, EOFError))
    return outside or type(error).__module__.split(".")[0] in _LIBRARIES


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


def _remedy(error: Exception) -> str:
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "give the credentials where its library looks for them (environment, ~/.aws, ...)"
    return ""
