"""The partial output of a destination on a file system: a hidden directory, locked by one run.

A link, a rename or an exchange gives the output its final name. ``.NAME.partial/`` of a destination
``NAME`` contains

- ``lock``: locked by the process at work as long as it lives, with its pid and host; ``lock-N`` is
  locked by rank N of several;
- ``journal*``: which bytes of the output are durable, see `move.journal`;
- ``output/``: the files;
- ``replaced``: the old output that ``--overwrite`` has moved aside, where two steps are needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from reshard.engine.output import holder
from reshard.errors import ExistsError, ReshardError, ResourceError, UsageError
from reshard.system import signals, threads

_SYNCS = 16  # concurrent calls of fsync
FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # flock is not supported
_BLOCK = 512  # bytes: the unit of st_blocks


def build_disk_error(path: Path, error: OSError) -> ReshardError:
    """Return the error to raise for a system error while writing to ``path``."""
    if error.errno in FULL:
        return ResourceError(
            path.parent,
            f"the disk is full ({error.strerror})",
            "free some space, or choose another destination",
        )
    if error.errno == errno.EFBIG:
        return ResourceError(
            path,
            "the file is too large for the file system, or for the limit of this process",
            "write several files (a directory, with a smaller --max-shard-size), raise the limit"
            " (ulimit -f), or choose another destination",
        )
    return ReshardError(path, f"cannot be written: {error.strerror}")


def sync(paths: Iterable[Path]) -> None:
    """Make files and directories durable, many at once: file systems combine the flushes."""
    threads.parallel_map(paths, _sync_one, _SYNCS)


def _sync_one(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ResourceError(path, f"could not be made durable: {error.strerror}") from error


class LocalPartial:
    """The partial output of one destination on a local or shared file system.

    Args:
        destination: resolved; its parent exists.
    """

    keeps_without_resume = True  # unfinished output is kept even if --resume was not passed
    only_copy = False  # after a failure, the old output is put back

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.published = False
        self.leftover = ""
        self.path = destination.parent / f".{destination.name}.partial"
        self.output = self.path / "output"
        self.replaced = self.path / "replaced"
        self.resumable_bytes = 0  # bytes of the output from which a later run could continue
        self._lock: int | None = None

    @property
    def journals(self) -> list[Path]:
        """Paths of the existing journals, sorted."""
        return sorted(self.path.glob("journal*"))

    @property
    def recorded_bytes(self) -> int:
        """Disk usage of the output in bytes if there is a journal, else 0."""
        return self.used_bytes if self.journals else 0

    @property
    def used_bytes(self) -> int:
        """Disk usage of the output in bytes."""
        # Files have their full size from the start; only the blocks show how much was written.
        files = (path.lstat() for path in self.output.rglob("*"))
        return sum(file.st_blocks * _BLOCK for file in files if stat.S_ISREG(file.st_mode))

    def claim(self) -> None:
        """Create and lock the directory, or take over one that a dead process has left.

        Raises:
            ExistsError: a living process has locked it, or another file has its name.
            ReshardError: the parent directory cannot be written to.
            UsageError: the destination's name is too long.
        """
        while not self._try_claim():
            pass  # its holder has removed it in the meantime
        if self.replaced.exists() and not os.path.lexists(self.destination):
            self.replaced.rename(self.destination)  # the last run died between the two renames

    def join(self, rank: int) -> None:
        """Lock this rank's file in the claimed directory, so that nobody claims it before it ends.

        Raises:
            ReshardError: the directory cannot be written to.
        """
        self._lock = self._open_lock(f"lock-{rank}")
        self._acquire(self._lock)
        _write_holder(self._lock, self.path)

    def release(self) -> None:
        """Release the lock, so that another process can claim the directory."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            os.close(lock)  # this ends the lock, as the end of the process does

    def clear(self) -> None:
        """Remove the content and create an empty output."""
        self._remove_all()
        self.output.mkdir()

    def remove(self) -> None:
        """Remove the directory; its lock is removed last, so that no other process claims it."""
        if self._lock is None:
            return
        self._remove_all()
        for path in (*self._rank_locks, self.path / "lock"):
            path.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as error:  # another process may have claimed it already
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def remove_journals(self) -> None:
        """Remove the journals durably, so that no run resumes after the output is published."""
        for path in self.journals:
            path.unlink()
        self.resumable_bytes = 0
        sync([self.path])

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

    def _remove_all(self) -> None:
        for path in (*self.journals, self.output, self.replaced):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _try_claim(self) -> bool:
        """Try to lock the directory; return False if its holder removed it in the meantime."""
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            # A directory of ours has mode 0o700; anything else belongs to somebody else.
            status = _find_status(self.path)
            is_open = bool(status and status.st_mode & 0o077) and _keeps_modes(self.path.parent)
            if status and (is_open or stat.S_ISLNK(status.st_mode)):
                raise ExistsError(
                    self.path, "is in the way: it was not created by reshard", "remove it"
                ) from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                added = len(self.path.name) - len(self.destination.name)
                problem = f"has a name that is too long: {added} characters are added at first"
                raise UsageError(self.destination, problem, "choose a shorter name") from error
            where = self.destination.parent
            raise ReshardError(where, f"cannot be written to: {error.strerror}") from error
        path = self.path / "lock"
        try:
            lock = self._open_lock(path.name)
        except FileNotFoundError:
            return False
        try:
            self._acquire(lock)
            # Between the open and the lock, its holder may have removed the file, and another
            # process may have created a new one.
            status = _find_status(path)
            if status is None or not os.path.samestat(os.fstat(lock), status):
                os.close(lock)
                return False
            self._check_ranks()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _write_holder(lock, path)
        return True

    @property
    def _rank_locks(self) -> list[Path]:
        return sorted(self.path.glob("lock-*"))

    def _check_ranks(self) -> None:
        for path in self._rank_locks:
            lock = self._open_lock(path.name)
            try:
                self._acquire(lock)
            finally:
                os.close(lock)

    def _open_lock(self, name: str) -> int:
        path = self.path / name
        try:
            # O_NOFOLLOW: `_write_holder` must not overwrite the file that a link
            # in this place refers to.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):  # a directory that is not empty is not removed
                self.path.rmdir()
            raise build_disk_error(path, error) from error

    def _acquire(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _read_holder(lock)
            raise ExistsError(
                self.destination,
                f"is being written by {holder.describe(who)}",
                "wait until it ends, or choose another destination",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Without locks, the file alone decides. A process on another machine counts as alive.
            who = _read_holder(lock)
            if who is not None and not holder.is_dead(who):
                raise ExistsError(
                    self.path,
                    f"belongs to {holder.describe(who)}, and this file system has no locks that"
                    " show whether that process is still running",
                    f"remove {self.path}/lock* if it is not",
                ) from error


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step if the system can: Linux, on most local file systems."""
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and (
        rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
    )


def _keeps_modes(parent: Path) -> bool:
    """FAT, and network mounts that map all users to one, give every directory the same mode."""
    probe = parent / f".{os.urandom(8).hex()}"
    try:
        probe.mkdir(mode=0o700)
    except OSError as error:
        raise build_disk_error(parent, error) from error
    try:
        return not probe.lstat().st_mode & 0o077
    finally:
        probe.rmdir()


def _find_status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _write_holder(lock: int, path: Path) -> None:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, holder.encode_self(), 0)
    except OSError as error:
        raise build_disk_error(path, error) from error


def _read_holder(lock: int) -> holder.Holder | None:
    return holder.decode(os.pread(lock, 4096, 0))
