"""``verify --include`` and `check_file`: single files, or ranges of one, against a manifest.

Nothing but the named files and the manifest is read, so that each rank or node can check what it is
about to load.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from reshard.checks import names
from reshard.checks.files import FileDigests, find_file, find_other_blocks
from reshard.checks.hashes import read
from reshard.checks.result import Check
from reshard.commands.reading import Meter, open_progress
from reshard.commands.verify.options import VerifyOptions
from reshard.commands.verify.report import VerifyReport
from reshard.core.location import Location, get_directory
from reshard.errors import CorruptError, ReshardError, UsageError
from reshard.formats.run_directory import find_checkpoint
from reshard.system.files import get_size
from reshard.system.paths import as_path
from reshard.units import abridge, counted

_OF_WHOLE_CHECKPOINT = ("model", "write_manifest", "html", "ignore")  # options
_DEPTH = 2  # folders between the directory of a run and the files of a checkpoint


def check_file(
    path: str | Path,
    against: str | Path,
    ranges: Iterable[tuple[int, int]] | None = None,
    *,
    workers: int = 1,
) -> None:
    """Check a file of a checkpoint, or the parts of it that a program loads, against a manifest.

    Args:
        path: the file; the manifest finds it by the end of its path.
        against: a manifest that ``verify --write-manifest`` wrote for this checkpoint.
        ranges: the bytes that are loaded, as pairs of start and stop; None for the whole file.
            The blocks of 8 MiB that contain them are read.

    Raises:
        CorruptError: the bytes differ from those of the manifest.
        UsageError: the manifest does not list the file, or a range is not inside it.
        ReshardError: the file or the manifest cannot be read.
    """
    listed = read(as_path(against)).files
    found = find_file(listed, str(path))
    if found is None:
        raise UsageError(
            path,
            f"is not a file that the manifest {against} lists: {_list_names(listed)}",
            "pass a file of the checkpoint that the manifest was written from",
        )
    problem = _find_problem(found, str(path), ranges, workers)
    if problem:
        raise CorruptError(path, problem, "fetch the file again")


def check_included(
    sources: Sequence[Path], options: VerifyOptions, meter: Meter | None
) -> VerifyReport:
    """Check the files with a matching name against a manifest.

    Raises:
        UsageError: no manifest is given, no name matches, or another option contradicts this one.
        ReshardError: the manifest cannot be read.
    """
    began = time.perf_counter()
    if not options.against:
        raise UsageError("--include", "needs a manifest", "pass --against FILE")
    options.refuse_beside("--include", *_OF_WHOLE_CHECKPOINT)
    listed = read(as_path(options.against or "")).files
    chosen = _choose_files(listed, options)
    report = VerifyReport(str(sources[0]), names.FILES, options.given())
    blocks = sum(digests.block_count for digests in chosen)
    check = Check(
        names.FILES,
        f"{len(chosen)} of {counted(len(listed), 'file')}, {counted(blocks, 'block')}",
        exit_code=CorruptError.exit_code,
    )
    places = _find_places(sources, chosen, options.tag)
    with open_progress(meter, sum(digests.nbytes for digests in chosen)) as progress:
        for digests in chosen:
            check.failures += _describe_file(digests, places.get(digests.name), options)
            progress(digests.nbytes)
    report.checks = [check]
    report.bytes_read = sum(digests.nbytes for digests in chosen if digests.name in places)
    report.seconds = time.perf_counter() - began
    return report


def _describe_file(
    digests: FileDigests, place: str | None, options: VerifyOptions
) -> Iterable[str]:
    if place is None:
        yield f"{digests.name} is missing"
        return
    try:
        problem = _find_problem(digests, place, None, options.budget()[0])
    except UsageError:
        raise
    except ReshardError as error:
        problem = error.problem
    if problem:
        yield f"{place}: {problem}"


def _find_problem(
    digests: FileDigests, path: str, ranges: Iterable[tuple[int, int]] | None, workers: int
) -> str:
    blocks = digests.find_blocks([(0, digests.nbytes)] if ranges is None else ranges)
    found = get_size(path)
    if found != digests.nbytes:
        return f"has {found} bytes, but the manifest states {digests.nbytes}"
    other = find_other_blocks(digests, path, blocks, workers=workers)
    shown = abridge([f"{start}-{stop}" for start, stop in other])
    return f"its contents differ from those in the manifest in bytes {shown}" if other else ""


def _choose_files(listed: Sequence[FileDigests], options: VerifyOptions) -> list[FileDigests]:
    chosen: dict[str, FileDigests] = {}
    for pattern in options.include:
        found = [
            digests
            for digests in listed
            if fnmatchcase(digests.name, pattern)
            or fnmatchcase(PurePosixPath(digests.name).name, pattern)
        ]
        if not found:
            raise UsageError(
                f"--include {pattern}", f"matches no file of the manifest: {_list_names(listed)}"
            )
        chosen.update((digests.name, digests) for digests in found)
    return list(chosen.values())


def _find_places(
    sources: Sequence[Path], chosen: Sequence[FileDigests], tag: str | None
) -> dict[str, str]:
    folders = [found for path in sources if (found := _find_folder(path, chosen, tag))]
    if not folders:
        raise UsageError(
            sources[0],
            f"contains no file {abridge([digests.name for digests in chosen])}",
            "pass the directory of the checkpoint that the manifest was written from",
        )
    return {
        digests.name: str(folder / digests.name)
        for folder in folders
        for digests in chosen
        if (folder / digests.name).exists()
    }


def _find_folder(source: Path, chosen: Sequence[FileDigests], tag: str | None) -> Path | None:
    def has_files(location: Location) -> bool:
        return any((location.path / digests.name).exists() for digests in chosen)

    top = Location([get_directory(str(source))])
    level = [top]
    for _ in range(_DEPTH + 1):
        having = [location for location in level if has_files(location)]
        if having and (tag or len(having) > 1):
            checkpoint = find_checkpoint(top, tag, has_files)
            if checkpoint is None:
                raise UsageError(
                    source,
                    f"has files of the manifest in {abridge(list(map(str, having)))}",
                    "pass the directory of one checkpoint",
                )
            return checkpoint.path
        if having:
            return having[0].path
        level = [below for location in level for below in location.folders.values()]
    return None


def _list_names(listed: Sequence[FileDigests]) -> str:
    return abridge([digests.name for digests in listed])
