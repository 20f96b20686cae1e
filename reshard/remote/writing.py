"""Output in an object store appears whole or not at all, as far as a store without rename can.

Everything is uploaded below a hidden prefix beside the destination, and read back there. Then the
store itself copies it to its place: the files by which a checkpoint is found (an index,
`.metadata`, `latest`) come last, so that what lies there before is no checkpoint to anybody.
"""

from __future__ import annotations

import contextlib
import inspect
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from reshard.errors import DifferentError, ExistsError, ReshardError, UsageError
from reshard.ranks.team import ALONE, Team, told
from reshard.remote.path import RemotePath
from reshard.remote.reading import fetch
from reshard.remote.store import Store, attempt

_PART = 16 << 20  # bytes of one part of an upload
_MOST_PARTS = 9_000  # S3 takes ten thousand
_PARTS_AT_ONCE = 4
_COPIES_AT_ONCE = 16
_READ_BACK = 4 << 20  # bytes at a time
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs")  # stores whose first name must be there


class _HalfReplacedError(ReshardError):
    """The old output is gone, and the new one not in its place: nothing more is deleted."""


def check_bucket(destination: RemotePath) -> None:
    """Refuse a destination in a bucket that is not there.

    Raises:
        UsageError: it is not.
    """
    store = destination.store
    if len(destination.parts) < 3:
        raise UsageError(destination, "is a bucket", "name what to write in it")
    bucket = f"{store.scheme}://{destination.parts[1]}"
    if store.scheme in _BUCKETS and store.info(bucket) is None:
        raise UsageError(destination, f"there is no bucket {bucket}", "create it first")


@contextlib.contextmanager
def staged(
    destination: RemotePath, *, is_directory: bool, overwrite: bool, team: Team = ALONE
) -> Iterator[RemotePath]:
    """As `commit.staged`, for a destination in an object store."""
    if not team.first:
        yield RemotePath(told(team, ""))
        team.meet()  # written
        team.meet()  # moved
        return
    place = destination.parent / f".{destination.name}.partial-{secrets.token_hex(8)}"
    told(team, str(place))
    kept = False
    try:
        yield place
        team.meet()
        if is_directory:
            _publish_directory(place, destination, overwrite=overwrite)
        else:
            _publish(place / destination.name, destination, overwrite=overwrite)
        team.meet()
    except _HalfReplacedError:
        kept = True
        raise
    finally:
        if not kept:
            _remove(place)


def upload(made: Path, destination: RemotePath) -> None:
    """Send a file of this machine, in parts and again where that fails.

    Raises:
        ReshardError: it cannot be written.
    """
    store, url = destination.store, str(destination)
    nbytes = made.stat().st_size
    options = {
        "chunksize": max(_PART, -(-nbytes // _MOST_PARTS)),
        "max_concurrency": _PARTS_AT_ONCE,
    }
    put = getattr(store.files, "_put_file", store.files.put_file)
    known = inspect.signature(put).parameters
    options = {name: value for name, value in options.items() if name in known}

    def send() -> None:
        store.files.put_file(str(made), store.name_of(url), **options)
        found = store.info(url)
        if found is None or found["size"] != nbytes:
            raise OSError(f"{found and found['size']} of {nbytes} bytes arrived")

    attempt(url, send, "cannot be written")
    store.forget()


def check_same(made: Path, sent: RemotePath) -> None:
    """Read an uploaded file back, and compare it with the one that was sent.

    Raises:
        DifferentError: the store holds something else.
    """
    nbytes = made.stat().st_size
    with made.open("rb") as file:
        for start in range(0, nbytes, _READ_BACK):
            piece = file.read(_READ_BACK)
            if piece != fetch(sent.store, str(sent), start, len(piece)):
                raise DifferentError(
                    sent,
                    f"bytes {start} to {start + len(piece)} read back differ from those sent",
                    "the store or the way to it is at fault: nothing was kept",
                )


def _publish(made: RemotePath, destination: RemotePath, *, overwrite: bool) -> None:
    destination.store.forget()
    if not overwrite and destination.exists():
        raise ExistsError(
            destination, "was created by another process meanwhile", "nothing was changed"
        )
    _copy(destination.store, str(made), str(destination))


def _publish_directory(place: RemotePath, destination: RemotePath, *, overwrite: bool) -> None:
    store = destination.store
    store.forget()
    names = sorted(_below(store, str(place)), key=_order)
    old = sorted(_below(store, str(destination)), key=_order, reverse=True)
    if old and not overwrite:
        raise ExistsError(
            destination, "was created by another process meanwhile", "nothing was changed"
        )
    _delete(store, [f"{destination}/{name}" for name in old])
    try:
        late = [name for name in names if _is_marker(name)]
        early = [name for name in names if not _is_marker(name)]
        with ThreadPoolExecutor(_COPIES_AT_ONCE) as threads:
            for _ in threads.map(
                lambda name: _copy(store, f"{place}/{name}", f"{destination}/{name}"), early
            ):
                pass
        for name in late:
            _copy(store, f"{place}/{name}", f"{destination}/{name}")
    except BaseException as error:
        if old:
            raise _HalfReplacedError(
                destination,
                f"was removed to be replaced, and not all could be copied there: {error}",
                f"the new one lies whole, and checked, at {place}: copy it yourself",
            ) from error
        store.forget()
        _delete(store, [f"{destination}/{name}" for name in _below(store, str(destination))])
        raise
    finally:
        store.forget()


def _is_marker(name: str) -> bool:
    """Whether a checkpoint is found by this file."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith("latest") or last.endswith((".index.json", ".metadata"))


def _order(name: str) -> tuple[bool, int, str]:
    """Markers last, and the outermost of them at the very end."""
    return _is_marker(name), -name.count("/"), name


def _below(store: Store, url: str) -> list[str]:
    """Names of all objects below a prefix."""
    key = store.name_of(url).rstrip("/")
    found = attempt(url, lambda: store.files.find(key))
    return [str(name)[len(key) + 1 :] for name in found if str(name).startswith(f"{key}/")]


def _copy(store: Store, source: str, target: str) -> None:
    attempt(
        target,
        lambda: store.files.cp_file(store.name_of(source), store.name_of(target)),
        "cannot be copied to from its temporary place",
    )


def _delete(store: Store, urls: Sequence[str]) -> None:
    for url in urls:
        attempt(url, partial(store.files.rm_file, store.name_of(url)), "cannot be removed")


def _remove(place: RemotePath) -> None:
    """The temporary place, and uploads to it that did not end; the first error has been told."""
    store, url = place.store, str(place)
    with contextlib.suppress(ReshardError):
        _abort_uploads(store, url)
        store.forget()
        names = _below(store, url)
        if names:
            keys = [store.name_of(f"{url}/{name}") for name in names]
            attempt(url, lambda: store.files.rm(keys), "cannot be removed")
    store.forget()


def _abort_uploads(store: Store, url: str) -> None:
    """S3 keeps, and charges for, the parts of an upload that was never ended."""
    if not hasattr(store.files, "list_multipart_uploads"):
        return
    bucket, _, prefix = store.name_of(url).partition("/")
    for begun in attempt(url, lambda: store.files.list_multipart_uploads(bucket)):
        if begun["Key"].startswith(f"{prefix}/"):
            attempt(url, partial(store.files.abort_mpu, bucket, begun["Key"], begun["UploadId"]))
