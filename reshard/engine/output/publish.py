"""Publishing: the store copies uploaded files to their final names, because it cannot rename.

The files by which programs recognize a checkpoint (an index, `.metadata`, `latest`) are copied
last. Until then nobody mistakes the destination for a complete checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from reshard.errors import INTERRUPTED, DifferentError, ReshardError
from reshard.system import signals, threads
from reshard.system.remote import objects
from reshard.system.remote.attempts import attempt
from reshard.system.remote.path import RemotePath

_COPIES_AT_ONCE = 16
_STEP = 0.2, 5.0  # seconds between two polls of a copy in progress: the first and the longest


class HalfCopiedError(ReshardError):
    """The destination contains neither the old files nor the complete output."""

    def __init__(self, source: RemotePath, destination: RemotePath, problem: str) -> None:
        remedy = (
            f"the complete and checked output is at {source}:"
            " run the same command with --resume to publish it"
        )
        super().__init__(destination, problem, remedy)


def copy_file(source: RemotePath, destination: RemotePath, done: Callable[[], None]) -> None:
    """Copy one file to its final name.

    Args:
        source: the uploaded file.
        destination: the final name.
        done: called after the copy; signals wait until then.

    Raises:
        ReshardError: the file could not be copied.
    """
    with signals.deferred():
        _copy(source, destination)
        _check_sizes({destination: source.stat().st_size})
        done()


def copy_directory(
    source: RemotePath, destination: RemotePath, old: Sequence[str], done: Callable[[], None]
) -> None:
    """Copy the files of a directory to their final names, those that identify a checkpoint last.

    Args:
        source: the folder of the uploaded files.
        destination: the final folder.
        old: names of files at the destination, which are removed first.
        done: called after the last copy; signals wait until then.

    Raises:
        HalfCopiedError: a copy failed after old files were removed, or new files remain.
        ReshardError: a copy failed, and nothing is at the destination.
    """
    sizes = objects.list_sizes(source)
    late = sorted((name for name in sizes if _is_marker(name)), key=_depth)
    finished = False
    try:
        # Markers first, so that the remaining old files do not look like a complete checkpoint.
        _remove(destination, sorted(filter(_is_marker, old), key=_depth))
        _remove(destination, [name for name in old if not _is_marker(name)])
        early = [name for name in sizes if name not in late]
        threads.parallel_map(
            early, lambda name: _copy(source / name, destination / name), _COPIES_AT_ONCE
        )
        _check_sizes({destination / name: sizes[name] for name in early})
        # From the first marker on, programs may take the output for complete.
        # The outermost comes last.
        with signals.deferred():
            for name in reversed(late):
                _copy(source / name, destination / name)
            _check_sizes({destination / name: sizes[name] for name in late})
            done()
            finished = True
    except BaseException as error:
        if finished:  # a signal that waited for `deferred` to end
            raise
        if old:
            why = str(error) or "interrupted"
            problem = f"the old files were removed, but not all new ones could be copied: {why}"
            half = HalfCopiedError(source, destination, problem)
            if isinstance(error, KeyboardInterrupt):
                half.exit_code = INTERRUPTED
            raise half from error
        try:
            _remove(destination, list(sizes))
        except ReshardError as stuck:
            problem = (
                "not all files could be copied, and the copied ones could not be removed again:"
                f" {error}; {stuck}"
            )
            raise HalfCopiedError(source, destination, problem) from error
        raise


def _remove(destination: RemotePath, names: Sequence[str]) -> None:
    with signals.deferred():
        objects.remove([destination / name for name in names])


def _is_marker(name: str) -> bool:
    last = name.rsplit("/", 1)[-1]
    return last.startswith("latest") or last.endswith((".index.json", ".metadata"))


def _depth(name: str) -> tuple[int, str]:
    return name.count("/"), name


def _copy(source: RemotePath, target: RemotePath) -> None:
    store = target.store
    attempt(
        str(target),
        lambda: store.files.cp_file(source.key, target.key),
        "cannot be copied from its temporary folder",
    )
    _wait_for_copy(target)


def _wait_for_copy(target: RemotePath) -> None:
    """Wait until a copy is complete: Azure answers when a copy has started, not when it ends."""
    status = getattr(target.store.files, "service_client", None) and _read_azure_status
    wait = _STEP[0]
    while status is not None and (state := status(target)) not in (None, "success"):
        if state != "pending":
            raise ReshardError(target, f"could not be copied by the store: {state}")
        time.sleep(wait)
        wait = min(2 * wait, _STEP[1])


def _read_azure_status(target: RemotePath) -> str | None:
    from fsspec.asyn import sync

    files = target.store.files
    container, blob, _ = files.split_path(target.key)

    async def request() -> str | None:
        async with files.service_client.get_blob_client(container, blob) as client:
            properties = await client.get_blob_properties()
        return None if properties.copy.status is None else str(properties.copy.status)

    status: str | None = attempt(str(target), lambda: sync(files.loop, request))
    return status


def _check_sizes(expected: Mapping[RemotePath, int]) -> None:
    for path in expected:
        path.store.forget()
    for path, nbytes in expected.items():
        size = path.stat().st_size if path.exists() else None
        if size != nbytes:
            raise DifferentError(
                path,
                f"{nbytes:,} bytes were copied to it, but it "
                + ("does not exist" if size is None else f"has {size:,} bytes"),
                "the copy was discarded",
            )
