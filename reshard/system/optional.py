"""Libraries that only some commands need, and what to say where one is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from reshard.errors import UsageError

_OWN = ("reshard", "trainer")


class MissingModuleError(UsageError, ModuleNotFoundError):
    """A library is not installed, and what was asked for needs it."""


def install(*packages: str) -> str:
    """Return the command that installs packages, however reshard itself was installed."""
    return f"pip install {' '.join(packages)}"


def explain(
    error: ModuleNotFoundError, purpose: str, remedy: str = ""
) -> MissingModuleError | None:
    """Return the error to raise for an import that failed; None if a module of our own is missing.

    Args:
        purpose: what needs the module, for example "this command".
        remedy: the command that installs what is needed; empty: the library alone.
    """
    library = (error.name or "").partition(".")[0]
    if not library or library in _OWN:
        return None
    return build_error(library, purpose, remedy)


def build_error(library: str, purpose: str, remedy: str = "") -> MissingModuleError:
    """Return the error for a library that is not installed; the arguments are as in `explain`."""
    problem = f"needs {library}, which is not installed"
    return MissingModuleError(purpose, problem, remedy or install(library))


@contextmanager
def needed_for(purpose: str, remedy: str = "") -> Iterator[None]:
    """Name the library that an import in the block lacks; the arguments are as in `explain`.

    Raises:
        MissingModuleError: a library is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        explained = explain(error, purpose, remedy)
        if explained is None:
            raise
        raise explained from error


def require(library: str, purpose: str, remedy: str = "") -> None:
    """Refuse to go on without a library, before any work is done; arguments as in `explain`.

    Raises:
        MissingModuleError: it is not installed.
    """
    if find_spec(library) is None:
        raise build_error(library, purpose, remedy)
