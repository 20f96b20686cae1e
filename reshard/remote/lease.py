"""Who writes at a place of an object store: there are no locks, so signs of life are given.

How long ago another process gave one is counted by the store's own clock, from the time of a sign
that was given just now: no two machines' clocks are compared.
"""

from __future__ import annotations

import contextlib
import secrets
import threading

from reshard.errors import ExistsError, IncompleteError, ReshardError
from reshard.ranks import holder
from reshard.remote.path import RemotePath

BEAT = 10.0  # seconds between two signs
PATIENCE = 60.0  # seconds without one, and the process is taken for dead
LOCK = "lock-"  # what the signs' names begin with


class Lease(threading.Thread):
    """This process's: an object that is written anew as long as it holds the place.

    Args:
        place: everybody who writes there has such an object in it.
    """

    def __init__(self, place: RemotePath, destination: RemotePath) -> None:
        super().__init__(name="reshard-lease", daemon=True)
        self._place = place
        self._destination = destination
        self._sign = place / f"{LOCK}{secrets.token_hex(8)}"
        self._ended = threading.Event()

    def take(self) -> None:
        """Sign, then look for others: of two that come at once, one at least sees the other.

        Raises:
            ExistsError: another process gave a sign of life a moment ago.
            ReshardError: the store cannot be written to.
        """
        self._sign.write_bytes(holder.encode_self())
        for other in self._others():
            self._check_silent(other)
        self.start()

    def end(self) -> None:
        """Let another process have it."""
        self._ended.set()
        if self.is_alive():
            self.join(BEAT)
        with contextlib.suppress(ReshardError):  # a store that is away: it falls silent
            self._sign.remove()

    def check(self) -> None:
        """Refuse to go on where another process has taken over: this one was silent too long.

        Raises:
            ExistsError: it has.
        """
        self._sign.store.forget()
        if not self._sign.exists():
            raise ExistsError(
                self._destination,
                f"was taken over by another process: this one was silent for {PATIENCE:.0f} s",
                "nothing was changed",
            )

    def run(self) -> None:
        """A sign every few seconds; one that fails is made up for by the next."""
        while not self._ended.wait(BEAT):
            with contextlib.suppress(ReshardError):
                if self._sign.store.info(str(self._sign)) is None:
                    return  # it was taken over: see `check`
                self._sign.write_bytes(holder.encode_self())

    def _others(self) -> list[RemotePath]:
        self._sign.store.forget()
        there = self._place.glob(f"{LOCK}*")
        return [sign for sign in there if sign.name != self._sign.name]

    def _check_silent(self, other: RemotePath) -> None:
        try:
            who = holder.decode(other.read_bytes())
        except IncompleteError:
            return  # it has ended meanwhile
        silent = (self._place / self._sign.name).stat().st_mtime - other.stat().st_mtime
        if silent <= PATIENCE and not (who and holder.is_dead(who)):
            raise ExistsError(
                self._destination,
                f"is being written by {holder.describe(who)}, heard of {max(silent, 0):.0f} s ago",
                f"wait for it, or write elsewhere; if it is no more: {PATIENCE:.0f} s after its"
                " last sign of life another may come in",
            )
        other.remove()
