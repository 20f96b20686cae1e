"""The partial place on a file system, whose output gets its name by a link, a rename, a swap."""

from __future__ import annotations

import os
from pathlib import Path

from reshard import signals
from reshard.errors import ExistsError
from reshard.output.partial import Partial, sync
from reshard.ranks import holder


class Local(Partial):
    """The partial place of a destination on this machine, or on a file system that many share."""

    keeps_unasked = True  # what can be gone on with stays, without --resume too
    only_copy = False  # what was replaced is put back

    def __init__(self, destination: Path) -> None:
        super().__init__(destination)
        self.published = False

    def check_free(self) -> None:
        """As `check_destination`, once nobody else can be writing there.

        Raises:
            ExistsError: something has come there.
        """
        there = self.destination
        taken = os.path.lexists(there)
        if taken and not (there.is_dir() and not any(there.iterdir())):
            raise holder.build_conflict_error(there)

    def settle(self) -> None:
        """Make the output durable: what this machine has in its own cache."""
        sync([*self.output.rglob("*"), self.output])

    def publish(self, *, is_directory: bool, overwrite: bool) -> None:
        """Give the output its name; a signal waits until that is durable.

        Raises:
            ExistsError: something has come there, or cannot be replaced.
        """
        with signals.deferred():
            self.end_journals()
            if is_directory:
                self._publish_directory(overwrite=overwrite)
            else:
                self._publish_file(overwrite=overwrite)
            self.published = True
            sync([self.path.parent])

    def give_up(self, *, resume: bool) -> None:
        """A rank that fails leaves it to the first: the files are the same for both."""

    def _publish_file(self, *, overwrite: bool) -> None:
        made = self.output / self.destination.name
        if overwrite:
            made.replace(self.destination)
            return
        try:
            os.link(made, self.destination)  # unlike rename, replaces nothing of another process
        except FileExistsError as error:
            raise holder.build_conflict_error(self.destination) from error
        except OSError:  # a file system without hard links
            made.rename(self.destination)

    def _publish_directory(self, *, overwrite: bool) -> None:
        umask = os.umask(0)
        os.umask(umask)
        self.output.chmod(0o777 & ~umask)
        destination = self.destination
        replacing = overwrite and destination.exists()
        if replacing and _exchange(self.output, destination):
            return
        try:
            if replacing:
                destination.rename(self.replaced)
            self.output.rename(destination)
        except OSError as error:
            if replacing and self.replaced.exists() and not destination.exists():
                self.replaced.rename(destination)
            raise ExistsError(
                destination, f"could not be put in place: {error.strerror}", "nothing was changed"
            ) from error


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, where the system can: Linux, on most local file systems."""
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and (
        rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
    )
