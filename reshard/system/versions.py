"""Versions of source files: what shows that a file is still the one that was opened first.

The header of a file says where its values are. If a job saves again before the values are read,
they are cut from other bytes. So the version of each file is fixed when its header is read, and
compared whenever the file is opened again and after its last read.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from typing import Any, Protocol

from reshard.errors import CorruptError

_MOUNTS = "/proc/self/mountinfo"


class Versioned(Protocol):
    """A description of a file; `reshard.core.manifest.SourceFile` is one."""

    @property
    def version(self) -> FileVersion | None:
        """The version whose header was read; None if nothing has fixed it."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What a file system or an object store reports about a file that was not changed.

    Args:
        ctime_ns: when content or status changed last; None where it is not compared.
        inode: device and inode number; None where they are not compared.
        status: what changes the ctime, but not the content: mode, owner, group, number of links.
        tags: size and tags of an object, or size and times; empty for a local file.
        condition: the ETag or generation of an object, which a read can require; else empty.
    """

    nbytes: int
    mtime_ns: int = 0
    ctime_ns: int | None = None
    inode: tuple[int, int] | None = None
    status: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    condition: str = ""

    @classmethod
    def from_status(cls, status: os.stat_result) -> FileVersion:
        """Return the version of a local file."""
        return cls(
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            (status.st_dev, status.st_ino),
            (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_nlink),
        )

    def matches(self, status: os.stat_result) -> bool:
        """Return whether an open file has this version, without a look for reasons."""
        return (
            self.ctime_ns == status.st_ctime_ns
            and self.mtime_ns == status.st_mtime_ns
            and self.nbytes == status.st_size
        )

    @classmethod
    def from_json(cls, document: Any) -> FileVersion:
        """Return the version that `to_json` has described."""
        nbytes, mtime_ns, ctime_ns, status, tags = document
        return cls(nbytes, mtime_ns, ctime_ns, None, tuple(status), tuple(tags))

    def to_json(self) -> list[Any]:
        """Return what another run on the same files can compare.

        Some file systems number their inodes anew after each mount.
        """
        return [self.nbytes, self.mtime_ns, self.ctime_ns, [*self.status], [*self.tags]]

    @property
    def changed_ns(self) -> int:
        """When the file was changed or put in its place."""
        return max(self.mtime_ns, self.ctime_ns or 0)

    @property
    def portable(self) -> FileVersion:
        """The part that is the same on all machines that share the file.

        Clients of a network file system can have inode numbers of their own, and may see a ctime
        that another client's cache has not sent to the server yet.
        """
        return replace(self, ctime_ns=None, inode=None, status=())

    def __reduce__(self) -> tuple[Any, ...]:
        """Send only the portable part to another process, which may run on another machine."""
        return FileVersion, (self.nbytes, self.mtime_ns, None, None, (), self.tags, self.condition)

    def find_change(self, now: FileVersion) -> str:
        """Return what shows that the file was changed since; empty if nothing does.

        Links, modes and owners can change while a file is read, because no byte depends on them. A
        new ctime without such a reason is a change: a program that writes to a file and then
        restores its modification time leaves no other trace.
        """
        if self.nbytes != now.nbytes:
            return f"it had {self.nbytes} bytes and has {now.nbytes}"
        if self.tags or now.tags:
            is_same = self.tags == now.tags
            return "" if is_same else "the store reports another version of the object"
        if self.mtime_ns != now.mtime_ns:
            return "it has another modification time"
        return self._find_hidden_change(now)

    def _find_hidden_change(self, now: FileVersion) -> str:
        if self.ctime_ns is None or now.ctime_ns is None:
            return ""
        is_same_inode = None in (self.inode, now.inode) or self.inode == now.inode
        if self.ctime_ns == now.ctime_ns:
            is_same_inode = is_same_inode or _renumbers_inodes(now.inode)
            return "" if is_same_inode else "its name leads to another file"
        if is_same_inode and self.status != now.status:
            return ""
        return "it has the old modification time, but its status was changed (ctime)"


def _renumbers_inodes(inode: tuple[int, int] | None) -> bool:
    # libfuse numbers files itself unless a file system sets ``use_ino``, and numbers a file anew
    # after the kernel has forgotten it (libfuse 3.16 ``lib/fuse.c``, ``find_node``).
    if inode is None:
        return False
    place = f"{os.major(inode[0])}:{os.minor(inode[0])}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123 - `paths` imports this module
            lines = [line.partition(" - ") for line in mounts]
    except OSError:  # not Linux
        return False
    return any(place in left.split() and right.startswith("fuse") for left, _, right in lines)


def refuse_change(path: str, before: FileVersion, now: FileVersion) -> None:
    """Refuse a file that was changed after its header was read.

    Raises:
        CorruptError: it was changed, so the bytes read may be of two versions.
    """
    change = before.find_change(now)
    if not change:
        return
    if before.ctime_ns is None and not before.tags:
        raise CorruptError(
            path,
            f"is not the file whose header rank 0 has read: {change}",
            "check whether a job is still saving to it; if each node has a copy, copy it with its"
            " modification time (cp -p, rsync -t)",
        )
    raise CorruptError(
        path,
        f"was modified or replaced while it was read: {change}",
        "check whether a job is still saving to it; after the job has ended, run the command again"
        " or open the checkpoint again",
    )
