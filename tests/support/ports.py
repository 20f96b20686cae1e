"""Ports for servers that tests start on this machine."""

from __future__ import annotations

import atexit
import itertools
import os
import socket

_FIRST, _COUNT = 12_000, 8_000
"""Below the ports that the system gives to connections and to servers that ask for any port."""
_HELD = 8  # claims: a server takes its port long before so many others are asked for
_CLAIMS: list[socket.socket] = []


def find_free_port() -> int:
    """Return a port that no other process is given before the server listens.

    A port that is bound, closed and named to another process may be given away in between: the
    system chooses from the same ports for every connection. So these ports are of another range,
    and a bound socket of a second port marks each as taken.
    """
    for number in itertools.islice(itertools.count(os.getpid()), _COUNT):
        port = _FIRST + number % _COUNT
        claim = _bind(port + _COUNT)
        if claim is None:
            continue
        _CLAIMS.append(claim)
        if len(_CLAIMS) > _HELD:
            _CLAIMS.pop(0).close()
        probe = _bind(port)
        if probe is not None:
            probe.close()
            return port
    raise OSError(f"no port from {_FIRST} to {_FIRST + _COUNT} is free")


@atexit.register
def _release_claims() -> None:
    for claim in _CLAIMS:
        claim.close()


def _bind(port: int) -> socket.socket | None:
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        return None
    return bound
