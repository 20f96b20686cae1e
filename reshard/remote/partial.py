"""The place beside a destination in an object store where its output grows, found again.

``.NAME.partial/`` of a destination ``NAME`` holds

- ``lock-*``: of the process at work, see `lease`;
- ``job-*`` and ``sent-*/``: which files are there for good, see `move.receipts`;
- ``output*/``: the files;
- ``moving``: while they are copied to their own names.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard import signals
from reshard.ranks import holder
from reshard.remote import publish, writing
from reshard.remote.lease import LOCK, Lease
from reshard.remote.path import RemotePath

JOB, SENT, OUTPUT = "job", "sent", "output"
"""What names in the place begin with; ``-`` and a digest follow where they are of one job."""

_MOVING = "moving"


class RemotePartial:
    """The partial place of one destination."""

    keeps_without_resume = False  # a store charges for what nobody may ask for again

    def __init__(self, destination: RemotePath) -> None:
        self.destination = destination
        self.path = path_of(destination)
        self.output = self.path / OUTPUT
        self.resumable_bytes = 0  # of the output, with which a later run could go on
        self.published = False
        self.only_copy = False
        self._joined = False
        self._lease: Lease | None = None

    @property
    def recorded_bytes(self) -> int:
        """What a run has noted there as done for good: files that have a receipt."""
        sizes = writing.sizes_below(self.path)
        noted = (n.replace(SENT, OUTPUT, 1) for n in sizes if n.startswith(SENT))
        return sum(sizes.get(name, 0) for name in noted)

    @property
    def used_bytes(self) -> int:
        """What the output takes in the store by now."""
        sizes = writing.sizes_below(self.path).items()
        return sum(nbytes for name, nbytes in sizes if name.startswith(OUTPUT))

    def claim(self) -> None:
        """Take it, over from a process that is no more if there was one.

        Raises:
            ExistsError: a living process holds it.
            ReshardError: the store cannot be written to.
        """
        self._lease = Lease(self.path, self.destination)
        try:
            self._lease.take()
        except BaseException:
            self.release()
            raise

    def join(self, rank: int) -> None:  # noqa: ARG002 - as `output.partial`
        """Nothing is to be taken: the first rank's end is soon every other's."""
        self._joined = True

    @signals.undivided
    def release(self) -> None:
        """Let another process have it."""
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def clear(self) -> None:
        """Remove what is in it."""
        writing.abort_uploads(self.path)
        names = writing.sizes_below(self.path)
        writing.remove([self.path / name for name in names if not name.startswith(LOCK)])

    def remove(self) -> None:
        """Remove it, if it was claimed."""
        if self._lease is not None:
            self.clear()

    def check_destination_free(self) -> None:
        """As `check_destination`, once nobody else can be writing there.

        Raises:
            ExistsError: something has come there.
        """
        self.destination.store.forget()
        if self.destination.exists() and not is_moving(self.destination):
            raise holder.build_conflict_error(self.destination)

    def make_durable(self) -> None:
        """A store answers when it has what was sent."""

    def publish(self, *, is_directory: bool, overwrite: bool) -> None:
        """Let the store copy the output to its own name.

        Raises:
            ExistsError: something has come there, or another process has taken over.
            ReshardError: it cannot be copied; nothing is there then, but what was not replaced yet.
        """
        self._held().check()
        if not is_directory:
            if not overwrite:
                self.check_destination_free()
            publish.copy_file(self.output / self.destination.name, self.destination, self._done)
            return
        old = writing.sizes_below(self.destination)
        if old and not overwrite:
            self._check_own(old)
        moving = self.path / _MOVING
        moving.write_bytes(b"")
        try:
            publish.copy_directory(self.output, self.destination, list(old), self._done)
        except publish.HalfCopiedError:
            self.only_copy = True
            raise
        except BaseException:
            if not self.published:
                moving.remove()
            raise

    def discard_share(self, *, resume: bool) -> None:
        """Take back what a rank that is not the first has sent."""
        if self._joined and not resume:
            writing.abort_uploads(self.output)
            writing.remove([self.output / name for name in writing.sizes_below(self.output)])

    def _done(self) -> None:
        self.published = True

    def _held(self) -> Lease:
        assert self._lease is not None, "it was claimed"
        return self._lease

    def _check_own(self, there: Mapping[str, int]) -> None:
        """What is at the destination must be of a run that died while it copied."""
        foreign = there.items() - writing.sizes_below(self.output).items()
        if foreign or not is_moving(self.destination):
            raise holder.build_conflict_error(self.destination)


def path_of(destination: RemotePath) -> RemotePath:
    """Where the output of a destination grows."""
    return destination.parent / f".{destination.name}.partial"


def is_moving(destination: RemotePath) -> bool:
    """Whether a run is copying its output there, or died when it did."""
    return destination.store.info(str(path_of(destination) / _MOVING)) is not None
