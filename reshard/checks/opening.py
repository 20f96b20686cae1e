"""Reading a source that may be damaged: its manifest, or the check that says why there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reshard import formats
from reshard.checks import names
from reshard.checks.result import Check
from reshard.errors import (
    CorruptError,
    IncompleteError,
    ReshardError,
    StaleError,
    UnsafeError,
)
from reshard.manifest import Manifest, check
from reshard.paths import as_path

_INDEXES = (".index.json", ".metadata", ".distcp")  # a .distcp file is read through .metadata alone


def opened(read: Callable[[], Manifest]) -> Manifest | Check:
    """The manifest with its coverage proved, or the check that failed.

    Args:
        read: reads the source, without proving its coverage.

    Raises:
        ReshardError: what says nothing of the checkpoint: no such path, an unsupported form.
    """
    try:
        manifest = read()
    except (IncompleteError, CorruptError, UnsafeError) as error:
        return _failed(_name(error), error)
    try:
        check(manifest)
    except CorruptError as error:
        return _failed(names.COVERAGE, error)
    return manifest


def _failed(name: str, error: ReshardError) -> Check:
    text = f"{error.where}: {error.problem}" + (f" ({error.remedy})" if error.remedy else "")
    return Check(name, "the source cannot be read", [text], exit_code=error.exit_code)


def _name(error: ReshardError) -> str:
    """Which check a reader's error fails."""
    if isinstance(error, UnsafeError):
        return names.SAFE
    if isinstance(error, StaleError):
        return names.STALE
    if error.where.endswith(_INDEXES):
        return names.INDEX
    if isinstance(error, IncompleteError):
        return names.COMPLETE
    return names.AGREEMENT if _opens(as_path(error.where)) else names.HEADERS


def _opens(path: Path) -> bool:
    """Whether a file is whole by itself, so that it contradicts others."""
    try:
        formats.open_alone(path)
    except ReshardError:
        return False
    return True
