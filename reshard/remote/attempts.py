"""Requests to a store, made again where that may help, and what is said where it does not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from reshard.errors import IncompleteError, ReshardError

T = TypeVar("T")

ATTEMPTS = 6  # of one request
FIRST_WAIT = 0.3  # seconds before the second attempt; each later wait is twice as long
_LONGEST_WAIT = 10.0
_PATIENT = {"gs": 2, "gcs": 2, "az": 2, "abfs": 2}  # their libraries wait longer each time
_FINAL = (IsADirectoryError, NotADirectoryError)
_REFUSED = (401, 403)
_LIBRARIES = frozenset(
    "adlfs aiobotocore aiohttp azure botocore fsspec gcsfs google requests s3fs urllib3".split()
)
_HOPELESS = frozenset(
    "NoCredentialsError PartialCredentialsError DefaultCredentialsError"
    " ParamValidationError".split()
)
CREDENTIALS = "give the credentials where its library looks for them (environment, ~/.aws, ...)"


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
    return CREDENTIALS if refused or "Credentials" in type(error).__name__ else ""
