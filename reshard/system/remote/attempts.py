"""Requests to a store: repeated where that may help, and turned into errors where it does not."""

from __future__ import annotations

import asyncio
import errno
import random
import time
import traceback
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from reshard.errors import IncompleteError, ReshardError, UsageError
from reshard.system import signals

T = TypeVar("T")

ATTEMPTS = 6  # for one request
FIRST_WAIT = 0.3  # seconds before the second attempt; each later wait is twice as long
_LONGEST_WAIT = 10.0
PATIENCE = 120.0  # seconds for which requests are repeated that the store answers with SlowDown
_STEP = 0.1  # seconds between two looks for an interrupt
_FEW_ATTEMPTS = {
    "gs": 2,
    "gcs": 2,
    "az": 2,
    "abfs": 2,
}  # their libraries repeat requests themselves


class ChangedObjectError(OSError):
    """The object is not the version that a request asked for."""


_FINAL = (IsADirectoryError, NotADirectoryError, ChangedObjectError)
_REFUSED = (401, 403)
_BUSY = (429, 503)
PRECONDITION_FAILED = 412
# Errors are recognized by names, so that no store's library has to be imported or installed.
_LIBRARIES = frozenset(
    "adlfs aiobotocore aiohttp azure botocore fsspec gcsfs google hf_xet httpcore httpcore2"
    " httpx httpx2 huggingface_hub requests s3fs urllib3".split()
)
_HOPELESS = frozenset(
    "NoCredentialsError PartialCredentialsError DefaultCredentialsError"
    " ParamValidationError".split()
)
CREDENTIALS = "provide credentials where the store's library finds them (environment, ~/.aws, ...)"


def attempt(url: str, request: Callable[[], T], what: str = "cannot be reached") -> T:
    """Make a request, and repeat it where another attempt may succeed.

    A store that is asked to do too much answers 503 (``SlowDown``) or 429 to some requests, or to
    all for a while. These answers do not count as attempts until `PATIENCE` is over.

    Args:
        what: the problem to report if it fails.

    Raises:
        IncompleteError: the object does not exist.
        UsageError: the store cannot have an object of this name.
        ReshardError: the request was refused, or every attempt failed.
    """
    most = min(ATTEMPTS, _FEW_ATTEMPTS.get(url.partition("://")[0], ATTEMPTS))
    failed, patient_until = 0, 0.0
    for repeated in count():
        signals.check()
        try:
            return request()
        except Exception as error:
            if _get_status(error) == 404:
                raise IncompleteError(url, "does not exist") from error
            if _rejects_name(error):
                raise UsageError(url, f"is not a path of this store: {_describe(error)}") from error
            if not _is_external(error):
                raise
            if _is_final(error):
                problem = f"{what}: {_describe(error)}"
                raise ReshardError(url, problem, _suggest(error)) from _as_os_error(error)
            patient_until = patient_until or time.monotonic() + PATIENCE
            failed += not (_is_busy(error) and time.monotonic() < patient_until)
            if failed == most:
                raise ReshardError(
                    url,
                    f"{what} after {repeated + 1} attempts: {_describe(error)}",
                    "check the network and the store, then run the same command again",
                ) from _as_os_error(error)
            _sleep(_choose_wait(repeated))
    raise AssertionError("unreachable")


async def attempt_patiently(request: Callable[[], Awaitable[T]]) -> T:
    """Make a request that is part of another one, and repeat it while the store is busy."""
    patient_until = time.monotonic() + PATIENCE
    for repeated in count():
        try:
            return await request()
        except Exception as error:
            if not _is_busy(error) or time.monotonic() > patient_until:
                raise
            await asyncio.sleep(_choose_wait(repeated))
    raise AssertionError("unreachable")


def _choose_wait(repeated: int) -> float:
    """Return the seconds before the next attempt, which spread concurrent requests."""
    wait: float = min(FIRST_WAIT * 2 ** min(repeated, 10), _LONGEST_WAIT)
    return wait * random.uniform(0.5, 1)  # noqa: S311


def _sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        signals.check()
        time.sleep(min(left, _STEP))


def _is_external(error: Exception) -> bool:
    outside = isinstance(error, (OSError, EOFError))
    return outside or type(error).__module__.split(".")[0] in _LIBRARIES


def _rejects_name(error: Exception) -> bool:
    """Return whether a store's library refuses the name of an object, without a request."""
    if not isinstance(error, ValueError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    return module.split(".")[0] in _LIBRARIES


def _as_os_error(error: Exception) -> OSError:
    """Return a library's error as an OSError, which `errors.has_external_cause` recognizes."""
    if isinstance(error, OSError):
        return error
    outside = ConnectionError(_describe(error))
    outside.__cause__ = error
    return outside


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


def _get_status(error: Exception) -> int | None:
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden:"):  # gcsfs
        return 403
    status = getattr(error, "status_code", None) or getattr(error, "code", None)  # azure; gcsfs
    if status is None:  # huggingface_hub
        status = getattr(getattr(error, "response", None), "status_code", None)
    return int(str(status)) if str(status).isdigit() else None


def _is_busy(error: Exception) -> bool:
    return getattr(error, "errno", None) == errno.EBUSY or _get_status(error) in _BUSY  # s3fs


def _is_final(error: Exception) -> bool:
    hopeless = type(error).__name__ in _HOPELESS
    refused = (*_REFUSED, PRECONDITION_FAILED)
    return hopeless or isinstance(error, _FINAL) or _get_status(error) in refused


def _suggest(error: Exception) -> str:
    refused = _get_status(error) in _REFUSED
    return CREDENTIALS if refused or "Credentials" in type(error).__name__ else ""
