"""Comparison of a planned output with files that are at its destination already."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
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
    try:
        with SourceFiles(sources) as pool:
            planned = OnDemandFiles(
                plan, sources, pool, on_overflow=on_overflow, has_checksums=False
            )
            return all(
                _has_content(directory / file.name, file)
                and (is_stamped or _has_bytes(directory, file, planned))
                for file in skeleton.files
            )
    except OSError:
        return False


def _has_content(path: Path, planned: OutputFile) -> bool:
    checksums = _list_locations(planned)
    with path.open("rb") as file:
        if path.stat().st_size != planned.nbytes:
            return False
        for offset, data in planned.literals:
            file.seek(offset)
            if not _is_same(file.read(len(data)), data, offset, checksums):
                return False
    return True


def _has_bytes(directory: Path, output: OutputFile, planned: OnDemandFiles) -> bool:
    checksums = _list_locations(output)
    with (directory / output.name).open("rb") as file:
        for offset in range(0, output.nbytes, _COMPARED_BYTES):
            expected = planned.read(output.name, offset, _COMPARED_BYTES)
            if not _is_same(file.read(_COMPARED_BYTES), expected, offset, checksums):
                return False
    return True


def _list_locations(file: OutputFile) -> list[int]:
    return sorted(location for stored in file.checksums for location in stored.locations)


def _is_same(found: bytes, expected: bytes, start: int, checksums: Sequence[int]) -> bool:
    """Compare a range of a file, which begins at byte ``start``, without its checksums."""
    blank = bytearray(found)
    first, last = bisect_right(checksums, start - 4), bisect_left(checksums, start + len(expected))
    for location in checksums[first:last]:
        for at in range(max(location, start), min(location + 4, start + len(expected))):
            blank[at - start] = expected[at - start]
    return blank == expected
