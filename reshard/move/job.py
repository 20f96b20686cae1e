"""Which job an unfinished output is of, and the lines in which runs write down what they did.

A line of JSON stands behind its own CRC-32: one that is cut off or damaged counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reshard.checksum import crc32
from reshard.errors import CorruptError, UsageError
from reshard.manifest import Skeleton, SourceFile
from reshard.paths import as_path, is_remote
from reshard.version import __version__

if TYPE_CHECKING:
    from reshard.remote.path import RemotePath

_CRC = 8  # characters

Job = Mapping[str, Any]


def describe(
    sources: Iterable[SourceFile], options: Mapping[str, object], skeleton: Skeleton
) -> Job:
    """What must be the same for a run to go on where another stopped.

    Args:
        options: those that have a say in the output's bytes; where one names a file, that counts.
    """
    laid_out = hashlib.sha256()
    for file in skeleton.files:
        laid_out.update(repr((file.name, file.nbytes, len(file.literals))).encode())
        for offset, data in file.literals:
            laid_out.update(repr((offset, len(data))).encode() + data)
    return {
        "reshard": __version__,
        "options": {name: _stamped(value) for name, value in options.items()},
        "output": laid_out.hexdigest(),
        "sources": {
            file.path: [file.nbytes, *_stamp(file.path)] for file in sources if file.lasting
        },
    }


def check_sources(job: Job, sources: Iterable[SourceFile]) -> None:
    """No file was written to while it was read; of an object store's, the reader sees to that.

    One that was removed meanwhile was read as it was, or the read failed.

    Raises:
        CorruptError: one was: what was read of it may be of two states.
    """
    for file in sources:
        if not file.lasting or is_remote(file.path):
            continue
        stamp = _stamp(file.path)
        if stamp and [file.nbytes, *stamp] != job["sources"][file.path]:
            raise CorruptError(
                file.path,
                "was written to, or replaced, while it was read",
                "is a job still saving to it? run again when it has ended",
            )


def _stamped(value: object) -> str:
    named = isinstance(value, (str, Path)) and str(value)
    return repr((value, *_stamp(str(value)))) if named else repr(value)


def _stamp(path: str) -> tuple[object, ...]:
    """When and at what size a file was written; nothing where there is none."""
    try:
        where = as_path(path)
        if is_remote(str(where)):
            return cast("RemotePath", where).version
        status = where.stat()
    except (OSError, ValueError):
        return ()
    return status.st_size, status.st_mtime_ns


def digest(job: Job) -> str:
    """A name for it."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]


def check_same_job(destination: Path, before: Job, now: Job) -> None:
    """Refuse to go on with what another job has left.

    Raises:
        UsageError: saying what is different.
    """
    if before != now:
        raise UsageError(
            destination,
            f"the run that was interrupted cannot be gone on with: {_change(before, now)}",
            "run what was run then, or leave out --resume to begin anew",
        )


def line(document: object) -> bytes:
    """A document as a line."""
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def whole(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines before the first that is cut off or damaged."""
    for each in lines:
        text = each[_CRC + 1 : -1]
        if each != b"%08x %b\n" % (crc32(text), text):
            return
        yield each


def document(line: bytes) -> Any:
    """What a whole line says."""
    return json.loads(line[_CRC + 1 :])


def _change(before: Job, now: Job) -> str:
    """The first thing in which two jobs differ."""
    if before["reshard"] != now["reshard"]:
        return f"it was of reshard {before['reshard']}, this is {now['reshard']}"
    for what in ("sources", "options"):
        for name in {**before[what], **now[what]}:
            if before[what].get(name) != now[what].get(name):
                return f"{name} is not as it was then"
    return "its output was laid out in another way"
