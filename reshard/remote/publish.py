"""What was sent gets its name: copied by the store itself, for there is no rename.

The files by which a checkpoint is found (an index, `.metadata`, `latest`) come last, so that what
lies there before is no checkpoint to anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from reshard import signals, threads
from reshard.errors import INTERRUPTED, DifferentError, ReshardError
from reshard.remote import writing
from reshard.remote.attempts import attempt
from reshard.remote.path import RemotePath

_COPIES_AT_ONCE = 16
_STEP = 0.2, 5.0  # seconds between two looks at a copy that is under way, the first and the longest


class HalfCopiedError(ReshardError):
    """What is at the destination is neither what was there nor all of the output."""

    def __init__(self, made: RemotePath, destination: RemotePath, problem: str) -> None:
        remedy = (
            f"the output lies whole, and checked, at {made}:"
            " the same command with --resume puts it in place"
        )
        super().__init__(destination, problem, remedy)


def copy_file(made: RemotePath, destination: RemotePath, done: Callable[[], None]) -> None:
    """Give one file its name.

    Args:
        done: called once it has it; a signal waits until then.
    """
    with signals.deferred():
        _copy(made, destination)
        _check_sizes({destination: made.stat().st_size})
        done()


def copy_directory(
    made: RemotePath, destination: RemotePath, old: Sequence[str], done: Callable[[], None]
) -> None:
    """Give files their names, those that others are found by last; arguments as `copy_file`.

    Args:
        old: what lies at the destination, and goes before anything is copied.

    Raises:
        HalfCopiedError: not all could be copied, and old ones are gone, or new ones stay.
        ReshardError: not all could be copied, and nothing is there.
    """
    sizes = writing.sizes_below(made)
    late = sorted((name for name in sizes if _is_marker(name)), key=_depth)
    finished = False
    try:
        _remove(destination, sorted(filter(_is_marker, old), key=_depth))
        _remove(destination, [name for name in old if not _is_marker(name)])
        early = [name for name in sizes if name not in late]
        threads.parallel_map(
            early, lambda name: _copy(made / name, destination / name), _COPIES_AT_ONCE
        )
        _check_sizes({destination / name: sizes[name] for name in early})
        with signals.deferred():
            for name in reversed(late):
                _copy(made / name, destination / name)
            _check_sizes({destination / name: sizes[name] for name in late})
            done()
            finished = True
    except BaseException as error:
        if finished:  # a signal that waited
            raise
        if old:
            why = str(error) or "interrupted"
            what = f"was removed to be replaced, and not all could be copied there: {why}"
            half = HalfCopiedError(made, destination, what)
            if isinstance(error, KeyboardInterrupt):
                half.exit_code = INTERRUPTED
            raise half from error
        try:
            _remove(destination, list(sizes))
        except ReshardError as stuck:
            what = f"not all could be copied there, nor removed again: {error}; {stuck}"
            raise HalfCopiedError(made, destination, what) from error
        raise


@signals.undivided
def _remove(destination: RemotePath, names: Sequence[str]) -> None:
    writing.remove([destination / name for name in names])


def _is_marker(name: str) -> bool:
    """Whether a checkpoint is found by this file."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith("latest") or last.endswith((".index.json", ".metadata"))


def _depth(name: str) -> tuple[int, str]:
    """The outermost first."""
    return name.count("/"), name


def _copy(source: RemotePath, target: RemotePath) -> None:
    store = target.store
    attempt(
        str(target),
        lambda: store.files.cp_file(source.key, target.key),
        "cannot be copied to from its temporary place",
    )
    _await(target)


def _await(target: RemotePath) -> None:
    """Azure answers when it has begun to copy; its other end is asked for."""
    status = getattr(target.store.files, "service_client", None) and _azure_status
    wait = _STEP[0]
    while status is not None and (said := status(target)) not in (None, "success"):
        if said != "pending":
            raise ReshardError(target, f"could not be copied by the store: {said}")
        time.sleep(wait)
        wait = min(2 * wait, _STEP[1])


def _azure_status(target: RemotePath) -> str | None:
    """How the last copy to a blob stands; None where none was made."""
    from fsspec.asyn import sync

    files = target.store.files
    container, blob, _ = files.split_path(target.key)

    async def asked() -> str | None:
        async with files.service_client.get_blob_client(container, blob) as client:
            found = await client.get_blob_properties()
        return None if found.copy.status is None else str(found.copy.status)

    status: str | None = attempt(str(target), lambda: sync(files.loop, asked))
    return status


def _check_sizes(wanted: Mapping[RemotePath, int]) -> None:
    """What was copied must be there, whole, before it can be found."""
    for path in wanted:
        path.store.forget()
    for path, nbytes in wanted.items():
        held = path.stat().st_size if path.exists() else None
        if held != nbytes:
            raise DifferentError(
                path, f"{nbytes:,} bytes were copied there, {held} are there", "nothing was kept"
            )
