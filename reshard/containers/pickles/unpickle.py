"""Read pickles without running code: interpret their opcodes, and call nothing from the file.

An object that a pickle would construct by calling a global becomes a `Call`: the dotted name, the
arguments, the state. Callers turn the calls that they know into values of their own with
``builders``; names outside the allow-list are collected, or refused. Nothing is imported.

values   the representation of a pickle's names and calls
machine  the stack, the memo, and the opcodes that make up most of a pickle
opcodes  the other opcodes
sharing  the size of a value that refers to other values many times
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.containers.pickles import sharing
from reshard.containers.pickles.machine import Machine
from reshard.containers.pickles.opcodes import HANDLERS
from reshard.containers.pickles.values import BUILDERS, Builder
from reshard.errors import ALTERED, DAMAGED, CorruptError

_MAX_SHARED = 4  # repeated references that never need the check of the size


@dataclass(slots=True)
class Unpickled:
    """The value of a pickle, the offset of its end, and every global that it names.

    Args:
        stamp: the attribute `stamps.KEY` of a container, if one has it.
    """

    value: Any
    end: int
    globals: set[str]
    stamp: Any = None


def loads(
    data: bytes,
    *,
    where: object,
    start: int = 0,
    builders: Mapping[str, Builder] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Unpickled:
    """Interpret one pickle that begins at ``data[start]``.

    Args:
        where: the file, for messages.
        builders: dotted name -> our function that builds the value from the call's arguments.
        persistent: function that builds the value of a persistent id (torch: a storage).

    Raises:
        CorruptError: the stream is not a well-formed pickle.
        UnsafeError: it names a function that is useful only to an attack.
    """
    machine = Machine(data, start, where, {**BUILDERS, **(builders or {})}, persistent)
    try:
        value = machine.run(HANDLERS)
    # The handlers raise these on bytes that no pickler writes.
    except (
        RecursionError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        struct.error,
        AttributeError,
        OverflowError,
    ) as error:
        raise CorruptError(
            where,
            f"the pickle is damaged at byte {machine.position} of {len(data)}"
            f" ({type(error).__name__}: {error})",
            DAMAGED,
        ) from error
    if machine.shared > _MAX_SHARED and sharing.is_too_large(value, len(data) - start):
        raise CorruptError(
            where,
            "its pickle repeats one value so often that it cannot be expanded",
            ALTERED,
        )
    return Unpickled(value, machine.position, machine.globals, machine.stamp)
