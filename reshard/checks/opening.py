"""Opening of a source that may be damaged: its manifest, or the check that failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reshard import formats
from reshard.checks import names
from reshard.checks.result import Check
from reshard.core.manifest import Manifest, check
from reshard.errors import (
    CorruptError,
    IncompleteError,
    ReshardError,
    StaleError,
    UnsafeError,
)
from reshard.system.paths import as_path
from reshard.training.completeness import check_state

_INDEXES = (".index.json", ".metadata", ".distcp")  # .distcp files are read only through .metadata


def open_manifest(read: Callable[[], Manifest]) -> Manifest | Check:
    """Return the manifest that was proved whole, or the check that failed.

    Args:
        read: reads the source without the proof.

    Raises:
        ReshardError: the path does not exist, or the format is not supported; this says nothing
            about the state of the checkpoint.
    """
    try:
        manifest = read()
    except (IncompleteError, CorruptError, UnsafeError) as error:
        return _report_failure(_choose_check(error), error)
    for name, proof in ((names.COVERAGE, check), (names.SLOTS, check_state)):
        try:
            formats.prove(manifest, proof)
        except IncompleteError as error:
            return _report_failure(names.COMPLETE, error)
        except CorruptError as error:
            return _report_failure(name, error)
    return manifest


def _report_failure(name: str, error: ReshardError) -> Check:
    text = f"{error.where}: {error.problem}" + (f" ({error.remedy})" if error.remedy else "")
    return Check(name, "the source cannot be read", [text], exit_code=error.exit_code)


def _choose_check(error: ReshardError) -> str:
    if isinstance(error, UnsafeError):
        return names.SAFE
    if isinstance(error, StaleError):
        return names.STALE
    if error.where.endswith(_INDEXES):
        return names.INDEX
    if isinstance(error, IncompleteError):
        return names.COMPLETE
    return names.AGREEMENT if _can_open(as_path(error.where)) else names.HEADERS


def _can_open(path: Path) -> bool:
    """Return whether a file opens on its own, so that the fault is in its relation to others."""
    try:
        formats.open_alone(path)
    except ReshardError:
        return False
    return True
