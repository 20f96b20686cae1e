"""The partial output of a destination in an object store: a hidden folder, leased by one run.

``.NAME.partial/`` of a destination ``NAME`` contains

- ``lock-*``: the heartbeat of the process at work, see `lease`;
- ``job-*`` and ``sent-*/``: receipts of the files that are complete, see `move.receipts`;
- ``output*/``: the files;
- ``moving``: a marker that exists while the files are copied to their final names.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.engine.output import holder, publish
from reshard.engine.output.lease import LOCK, Lease
from reshard.system.remote import objects
from reshard.system.remote.path import RemotePath

JOB, SENT, OUTPUT = "job", "sent", "output"
"""Prefixes of names in the folder; for the files of one job, ``-`` and its digest follow."""

_MOVING = "moving"


class RemotePartial:
    """The partial output of one destination in an object store."""

    keeps_without_resume = False  # stores charge for unfinished output that nobody may resume

    def __init__(self, destination: RemotePath) -> None:
        self.destination = destination
        self.path = get_partial_path(destination)
        self.output = self.path / OUTPUT
        self.resumable_bytes = 0  # bytes of the output from which a later run could continue
        self.published = False
        self.leftover = ""
        self.only_copy = False
        self._joined = False
        self._lease: Lease | None = None

    @property
    def recorded_bytes(self) -> int:
        """Size in bytes of the files that have a receipt."""
        sizes = objects.list_sizes(self.path)
        recorded = (n.replace(SENT, OUTPUT, 1) for n in sizes if n.startswith(SENT))
        return sum(sizes.get(name, 0) for name in recorded)

    @property
    def used_bytes(self) -> int:
        """Size in bytes of the output's files in the store."""
        sizes = objects.list_sizes(self.path).items()
        return sum(nbytes for name, nbytes in sizes if name.startswith(OUTPUT))

    def claim(self) -> None:
        """Acquire the lease of the folder, if necessary from a dead process.

        Raises:
            ExistsError: a living process has the lease.
            ReshardError: the store cannot be written to.
        """
        self._lease = Lease(self.path, self.destination)
        try:
            self._lease.acquire()
        except BaseException:
            self.release()
            raise

    def join(self, rank: int) -> None:  # noqa: ARG002 - as in `output.local`
        """Join the first rank's claim; no lease is needed, since all ranks end soon after it."""
        self._joined = True

    def release(self) -> None:
        """Release the lease, so that another process can claim the folder."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def clear(self) -> None:
        """Remove the content of the folder, also of unfinished uploads, except for heartbeats."""
        objects.abort_uploads(self.path)
        names = objects.list_sizes(self.path)
        objects.remove([self.path / name for name in names if not name.startswith(LOCK)])

    def remove(self) -> None:
        """Remove the folder's content, if this process has claimed it."""
        if self._lease is not None:
            self.clear()

    def check_destination_free(self) -> None:
        """Repeat `check_destination` while this process has the lease.

        Raises:
            ExistsError: something was created there in the meantime.
        """
        self.destination.store.forget()
        if self.destination.exists() and not is_moving(self.destination):
            raise holder.build_conflict_error(self.destination)

    def make_durable(self) -> None:
        """Do nothing: a store acknowledges an upload only when it is durable."""

    def publish(self, *, is_directory: bool, overwrite: bool) -> None:
        """Let the store copy the output to its final name.

        Raises:
            ExistsError: the destination was created by another process, or the lease was lost.
            ReshardError: the output cannot be copied; old files that were not replaced remain.
        """
        self._claimed_lease().check()
        if not is_directory:
            if not overwrite:
                self.check_destination_free()
            publish.copy_file(self.output / self.destination.name, self.destination, self._done)
            return
        old = objects.list_sizes(self.destination)
        if old and not overwrite:
            self._check_only_own_files(old)
        # The marker comes first: after a crash, files at the destination are
        # known to be of this run.
        moving = self.path / _MOVING
        moving.write_bytes(b"")
        try:
            publish.copy_directory(self.output, self.destination, list(old), self._done)
        except publish.HalfCopiedError:  # `moving` stays: --resume accepts the copied files by it
            self.only_copy = True
            raise
        except BaseException:
            if not self.published:
                moving.remove()
            raise

    def discard_share(self, *, resume: bool) -> None:
        """Remove what this rank has uploaded, if it is not the first rank."""
        if self._joined and not resume:
            objects.abort_uploads(self.output)
            objects.remove([self.output / name for name in objects.list_sizes(self.output)])

    def _done(self) -> None:
        self.published = True

    def _claimed_lease(self) -> Lease:
        assert self._lease is not None, "claim() comes before publish()"
        return self._lease

    def _check_only_own_files(self, sizes: Mapping[str, int]) -> None:
        """Check that the destination has only files of a run that died while it copied them."""
        foreign = sizes.items() - objects.list_sizes(self.output).items()
        if foreign or not is_moving(self.destination):
            raise holder.build_conflict_error(self.destination)


def get_partial_path(destination: RemotePath) -> RemotePath:
    """Return the hidden folder in which the output of a destination grows."""
    return destination.parent / f".{destination.name}.partial"


def is_moving(destination: RemotePath) -> bool:
    """Return whether a run is copying its output to `destination`, or died while copying."""
    return destination.store.info(str(get_partial_path(destination) / _MOVING)) is not None
