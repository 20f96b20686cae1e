"""The place beside a destination where its output grows: one process's at a time, found again.

``.NAME.partial/`` of a destination ``NAME`` holds

- ``lock``: locked by the process at work, as long as it lives, and says who that is; ``lock-N`` by
  rank N of several;
- ``journal*``: which bytes of the output are there for good, see `move.journal`;
- ``output/``: the files;
- ``replaced``: what ``--overwrite`` has put aside, where it takes two steps to replace it.
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

from reshard import signals, threads
from reshard.errors import ExistsError, ReshardError, ResourceError
from reshard.ranks import holder

_SYNCS = 16  # at a time
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_BLOCK = 512  # bytes: the unit of st_blocks


def disk_error(path: Path, error: OSError) -> ReshardError:
    """What to raise for an error of the system while writing to ``path``."""
    if error.errno in _FULL:
        return ResourceError(
            path.parent, f"the disk is full ({error.strerror})", "free space, or write elsewhere"
        )
    return ReshardError(path, f"cannot be written: {error.strerror}")


def sync(paths: Iterable[Path]) -> None:
    """Make files and directories durable, many at once: a file system takes them together."""
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


class Partial:
    """The partial place of one destination.

    Args:
        destination: resolved; its parent exists.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.path = destination.parent / f".{destination.name}.partial"
        self.output = self.path / "output"
        self.replaced = self.path / "replaced"
        self.kept_bytes = 0  # of the output, with which a later run could go on
        self._lock: int | None = None

    @property
    def journals(self) -> list[Path]:
        """Those that are there."""
        return sorted(self.path.glob("journal*"))

    @property
    def noted_bytes(self) -> int:
        """What the output takes by now, where a run has noted what of it is done for good."""
        return self.held_bytes if self.journals else 0

    @property
    def held_bytes(self) -> int:
        """What the output takes on the disk by now."""
        files = (path.lstat() for path in self.output.rglob("*"))
        return sum(file.st_blocks * _BLOCK for file in files if stat.S_ISREG(file.st_mode))

    def claim(self) -> None:
        """Make it, or take over what a process left that is no more.

        Raises:
            ExistsError: a living process holds it, or something else is in its place.
            ReshardError: the directory cannot be written to.
        """
        with signals.deferred():
            while not self._claimed():
                pass  # its holder has removed it meanwhile
            if self.replaced.exists() and not os.path.lexists(self.destination):
                self.replaced.rename(self.destination)  # its run died between two steps

    def join(self, rank: int) -> None:
        """Take part in what the first rank has claimed: nobody claims it while this one lives.

        Raises:
            ReshardError: the directory cannot be written to.
        """
        with signals.deferred():
            lock = self._opened(f"lock-{rank}")
            self._lock = lock
            self._take(lock)
            _sign(lock, self.path)

    @signals.undivided
    def release(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Remove what is in it; an empty output is there then."""
        self._remove_all()
        self.output.mkdir()

    def remove(self) -> None:
        """Remove it; the lock goes last, so that nobody else comes in before."""
        if self._lock is None:
            return
        self._remove_all()
        for path in (*self._ranks_locks, self.path / "lock"):
            path.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as error:  # another process has come in already
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def end_journals(self) -> None:
        """No run goes on from here: durable before the output gets its name."""
        for path in self.journals:
            path.unlink()
        self.kept_bytes = 0
        sync([self.path])

    def _remove_all(self) -> None:
        for path in (*self.journals, self.output, self.replaced):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _claimed(self) -> bool:
        """Whether it could be taken; False where its holder went away meanwhile."""
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            mode = self.path.lstat().st_mode if os.path.lexists(self.path) else 0o700
            if mode and (mode & 0o077 or stat.S_ISLNK(mode)):
                raise ExistsError(self.path, "is in the way", "remove it") from None
        except OSError as error:
            where = self.destination.parent
            raise ReshardError(where, f"cannot be written to: {error.strerror}") from error
        path = self.path / "lock"
        try:
            lock = self._opened(path.name)
        except FileNotFoundError:
            return False
        try:
            self._take(lock)
            if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
                os.close(lock)
                return False
            self._check_ranks()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _sign(lock, path)
        return True

    @property
    def _ranks_locks(self) -> list[Path]:
        return sorted(self.path.glob("lock-*"))

    def _check_ranks(self) -> None:
        """A run whose first rank is no more may have others that write still."""
        for path in self._ranks_locks:
            lock = self._opened(path.name)
            try:
                self._take(lock)
            finally:
                os.close(lock)

    def _opened(self, name: str) -> int:
        path = self.path / name
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):  # it stays where others have put something in it
                self.path.rmdir()
            raise disk_error(path, error) from error

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _holder(lock)
            raise ExistsError(
                self.destination,
                f"is being written by {holder.describe(who)}",
                "wait for it, or write elsewhere",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            who = _holder(lock)
            if who is not None and not holder.is_dead(who):
                raise ExistsError(
                    self.path,
                    f"is of {holder.describe(who)}, and this file system has no"
                    " locks that say whether it lives",
                    f"remove {self.path}/lock* if it does not",
                ) from error


def _sign(lock: int, path: Path) -> None:
    """Write down who has a lock."""
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, holder.encode_self(), 0)
    except OSError as error:
        raise disk_error(path, error) from error


def _holder(lock: int) -> holder.Holder | None:
    """Who the lock's file says has it; None while that is being written."""
    return holder.decode(os.pread(lock, 4096, 0))
