"""Comparison of a planned output with files that are at its destination already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard.core.manifest import OutputFile, SourceFile
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.engine.move.options import OnOverflow
from reshard.engine.planning.planner import Plan
from reshard.system.files import SourceFiles

_COMPARED_BYTES = 4 << 20  # at a time


def is_written(
    plan: Plan,
    sources: Mapping[str, SourceFile],
    save_id: str,
    directory: Path,
    on_overflow: OnOverflow,
) -> bool:
    """Return whether a directory has every planned file, written from the same source.

    Sizes are compared, and all bytes that are known before tensors are read: headers and pickles.
    If these bytes include the id of the save (a digest of the source and the options), that is
    enough, because an output appears whole or not at all. In other layouts, every byte is
    compared.

    Args:
        save_id: see `Job`.
        directory: what the names of the planned files are relative to.
        on_overflow: see `OnDemandFiles`.
    """
    skeleton, stamp = plan.target, save_id.encode()
    is_stamped = bool(stamp) and any(
        stamp in data for file in skeleton.files for _, data in file.literals
    )
    checksums: dict[str, list[int]] = defaultdict(list)
    for stored in skeleton.checksums:
        checksums[stored.file] += stored.locations
    try:
        with SourceFiles(sources) as pool:
            planned = OnDemandFiles(
                plan, sources, pool, on_overflow=on_overflow, has_checksums=False
            )
            return all(
                _has_content(directory / file.name, file, checksums[file.name])
                and (is_stamped or _has_bytes(directory, file.name, planned, checksums[file.name]))
                for file in skeleton.files
            )
    except OSError:
        return False


def _has_content(path: Path, planned: OutputFile, checksums: Iterable[int]) -> bool:
    """Return whether a file has the planned size and known bytes, except stored checksums."""
    with path.open("rb") as file:
        if path.stat().st_size != planned.nbytes:
            return False
        for offset, data in planned.literals:
            file.seek(offset)
            if not _is_same(file.read(len(data)), data, offset, checksums):
                return False
    return True


def _has_bytes(
    directory: Path, name: str, planned: OnDemandFiles, checksums: Iterable[int]
) -> bool:
    """Return whether all bytes of a file are the planned ones, except stored checksums."""
    with (directory / name).open("rb") as file:
        for offset in range(0, planned.nbytes(name), _COMPARED_BYTES):
            expected = planned.read(name, offset, _COMPARED_BYTES)
            if not _is_same(file.read(_COMPARED_BYTES), expected, offset, checksums):
                return False
    return True


def _is_same(found: bytes, expected: bytes, start: int, checksums: Iterable[int]) -> bool:
    """Compare a range of a file, which begins at byte ``start``, without its checksums."""
    blank = bytearray(found)
    for location in checksums:
        for at in range(max(location, start), min(location + 4, start + len(expected))):
            blank[at - start] = expected[at - start]
    return blank == expected
