"""Jobs: the description that identifies a conversion, and the checksummed lines of journals.

A line is a JSON document after its CRC-32. A line that is cut off or damaged is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reshard.core.manifest import Skeleton, SourceFile
from reshard.errors import UsageError
from reshard.system.checksum import crc32
from reshard.system.paths import as_path, is_remote
from reshard.system.versions import FileVersion
from reshard.version import __version__

if TYPE_CHECKING:
    from reshard.system.remote.path import RemotePath

_CRC = 8  # hexadecimal digits

Job = Mapping[str, Any]


def describe(
    sources: Iterable[SourceFile], options: Mapping[str, object], skeleton: Skeleton
) -> Job:
    """Return everything that must be unchanged for a run to continue where another one stopped.

    Args:
        sources: the files of the source; files that are not kept (`lasting`) are left out.
        options: the options that influence the output's bytes. An option that names a file also
            contributes that file's size and modification time.
        skeleton: the output, whose layout becomes a digest.
    """
    layout = hashlib.sha256()
    for file in skeleton.files:
        layout.update(repr((file.name, file.nbytes)).encode())
        for offset, data in file.literals:
            layout.update(b"%d %d:" % (offset, len(data)))
            layout.update(data)
    return {
        "reshard": __version__,
        "options": {name: _describe_option(value) for name, value in options.items()},
        "output": layout.hexdigest(),
        "sources": {
            file.path: file.version.to_json() for file in sources if file.lasting and file.version
        },
    }


def select_portable(job: Job) -> Job:
    """Return the part of a job that is the same on all machines that share its files."""
    sources = {path: FileVersion.from_json(version) for path, version in job["sources"].items()}
    return {
        **job,
        "sources": {path: version.portable.to_json() for path, version in sources.items()},
    }


def _describe_option(value: object) -> str:
    named = isinstance(value, (str, Path)) and str(value)
    return repr((value, *_read_stamp(str(value)))) if named else repr(value)


def _read_stamp(path: str) -> tuple[object, ...]:
    try:
        where = as_path(path)
        if is_remote(str(where)):
            return cast("RemotePath", where).version
        status = where.stat()
    except (OSError, ValueError):
        return ()
    return status.st_size, status.st_mtime_ns


def compute_digest(job: Job) -> str:
    """Return 16 hexadecimal digits that identify the job on any machine."""
    text = json.dumps(select_portable(job), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_job(destination: Path, before: Job, now: Job) -> None:
    """Refuse to continue the unfinished output of another job.

    Raises:
        UsageError: the jobs differ; the message says in what.
    """
    if difference := _describe_difference(before, now):
        raise UsageError(
            destination,
            f"the interrupted run cannot be resumed: {difference}",
            "repeat the interrupted command exactly, or leave out --resume to start again",
        )


def format_line(document: object) -> bytes:
    """Return a document as one line with its checksum."""
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def iterate_valid_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines before the first one that is cut off or damaged."""
    for line in lines:
        text = line[_CRC + 1 : -1]
        if line != b"%08x %b\n" % (crc32(text), text):
            return
        yield line


def parse_line(line: bytes) -> Any:
    """Return the document of a valid line."""
    return json.loads(line[_CRC + 1 :])


def _describe_difference(before: Job, now: Job) -> str:
    if before["reshard"] != now["reshard"]:
        return f"it used reshard {before['reshard']}, this is {now['reshard']}"
    for path in {**before["sources"], **now["sources"]}:
        old, new = (
            FileVersion.from_json(version) if (version := job["sources"].get(path)) else None
            for job in (before, now)
        )
        if old is None or new is None or old.find_change(new):
            return f"{path} has changed since"
    for name in {**before["options"], **now["options"]}:
        if before["options"].get(name) != now["options"].get(name):
            return f"{name} has changed since"
    return "its output had another layout" if before["output"] != now["output"] else ""
