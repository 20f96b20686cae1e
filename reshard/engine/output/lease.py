"""Leases: the claim of a process on a folder of an object store, kept alive by heartbeats.

Object stores have no locks, so a process rewrites a heartbeat object again and again. The age of
another process's heartbeat is its modification time compared with that of a heartbeat written just
now. Both times come from the store, so the clocks of two machines are never compared.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from reshard.engine.output import holder
from reshard.errors import ExistsError, IncompleteError, ReshardError
from reshard.system import threads
from reshard.system.remote.path import RemotePath

BEAT = 10.0  # seconds between two heartbeats
PATIENCE = 60.0  # seconds without a heartbeat after which a process is considered dead
LOCK = "lock-"  # prefix of the names of heartbeat objects


class Lease:
    """The lease of this process; a thread rewrites its heartbeat object until it is released.

    Args:
        folder: contains the heartbeat object of every process that writes there.
        destination: the output, for error messages.
    """

    def __init__(self, folder: RemotePath, destination: RemotePath) -> None:
        self._folder = folder
        self._destination = destination
        self._path = folder / f"{LOCK}{secrets.token_hex(8)}"
        self._stop: Callable[[], None] | None = None

    def acquire(self) -> None:
        """Write a heartbeat, then look for those of others.

        Of two processes that start together, at least one sees the other.

        Raises:
            ExistsError: another process wrote a heartbeat recently.
            ReshardError: the store cannot be written to.
        """
        self._path.write_bytes(holder.encode_self())
        for other in self._others():
            self._check_expired(other)
        self._stop = threads.repeat(self._beat, BEAT, "reshard-lease")

    def release(self) -> None:
        """End the heartbeats and remove the object, so that another process can take the lease."""
        # The heartbeats end first: one more could create the object again.
        if self._stop is not None:
            self._stop()
        with contextlib.suppress(ReshardError):  # if it cannot be removed, it expires
            self._path.remove()

    def check(self) -> None:
        """Check that no other process has taken over the lease.

        Raises:
            ExistsError: another process has, because this one sent no heartbeat for too long.
        """
        self._path.store.forget()
        if not self._path.exists():
            raise ExistsError(
                self._destination,
                "was taken over by another process: this one sent no heartbeat for"
                f" {PATIENCE:.0f} s",
                "this run did not change the destination",
            )

    def _beat(self) -> bool:
        with contextlib.suppress(ReshardError):
            if self._path.store.info(str(self._path)) is None:
                return False  # it was taken over: see `check`
            self._path.write_bytes(holder.encode_self())
        return True

    def _others(self) -> list[RemotePath]:
        self._path.store.forget()
        locks = self._folder.glob(f"{LOCK}*")
        return [lock for lock in locks if lock.name != self._path.name]

    def _check_expired(self, other: RemotePath) -> None:
        try:
            who = holder.decode(other.read_bytes())
        except IncompleteError:
            return  # it has ended in the meantime
        silent = (self._folder / self._path.name).stat().st_mtime - other.stat().st_mtime
        if silent <= PATIENCE and not (who and holder.is_dead(who)):
            raise ExistsError(
                self._destination,
                f"is being written by {holder.describe(who)}, whose last heartbeat was"
                f" {max(silent, 0):.0f} s ago",
                "wait until it ends, or choose another destination; if that process is dead, its"
                f" claim expires {PATIENCE:.0f} s after its last heartbeat",
            )
        other.remove()
