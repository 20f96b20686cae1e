"""Publishing on a file system: the output gets its final name by a link, rename or exchange."""

from __future__ import annotations

import os
from pathlib import Path

from reshard import signals
from reshard.errors import ExistsError
from reshard.output.partial import Partial, sync
from reshard.ranks import holder


class LocalPartial(Partial):
    """The partial output of a destination on a local or shared file system."""

    keeps_without_resume = True  # unfinished output is kept even if --resume was not passed
    only_copy = False  # after a failure, the old output is put back

    def __init__(self, destination: Path) -> None:
        super().__init__(destination)
        self.published = False

    def check_destination_free(self) -> None:
        """Repeat `check_destination` while this process has the claim.

        Raises:
            ExistsError: something was created there in the meantime.
        """
        there = self.destination
        taken = os.path.lexists(there)
        if taken and not (there.is_dir() and not any(there.iterdir())):
            raise holder.build_conflict_error(there)

    def make_durable(self) -> None:
        """Make the output durable: flush what this machine has in its own cache."""
        sync([*self.output.rglob("*"), self.output])

    def publish(self, *, is_directory: bool, overwrite: bool) -> None:
        """Give the output its final name; signals wait until the new name is durable.

        Raises:
            ExistsError: the destination was created by another process, or cannot be replaced.
        """
        with signals.deferred():
            self.remove_journals()
            if is_directory:
                self._publish_directory(overwrite=overwrite)
            else:
                self._publish_file(overwrite=overwrite)
            self.published = True
            sync([self.path.parent])

    def discard_share(self, *, resume: bool) -> None:
        """Do nothing: all ranks write into the same files, which the first rank removes."""

    def _publish_file(self, *, overwrite: bool) -> None:
        file = self.output / self.destination.name
        if overwrite:
            file.replace(self.destination)
            return
        try:
            os.link(file, self.destination)  # unlike a rename, this never replaces a file
        except FileExistsError as error:
            raise holder.build_conflict_error(self.destination) from error
        except OSError:  # a file system without hard links
            file.rename(self.destination)

    def _publish_directory(self, *, overwrite: bool) -> None:
        umask = os.umask(0)  # the umask can be read only by setting it
        os.umask(umask)
        self.output.chmod(0o777 & ~umask)
        destination = self.destination
        replacing = overwrite and destination.exists()
        if replacing and _exchange(self.output, destination):
            return  # the old output is now in the hidden directory, which is removed
        try:
            if replacing:
                destination.rename(self.replaced)
            self.output.rename(destination)
        except OSError as error:
            if replacing and self.replaced.exists() and not destination.exists():
                self.replaced.rename(destination)
            raise ExistsError(
                destination,
                f"the output could not be renamed to this path: {error.strerror}",
                "nothing was changed",
            ) from error


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step if the system can: Linux, on most local file systems."""
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and (
        rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
    )
