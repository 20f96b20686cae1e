"""The error tree. Each class is one thing a caller can do about it, with its stable exit code.

ReshardError
|-- IncompleteError    1  something that must be there is not: fetch or re-save it
|-- DifferentError     1  a check found different values: look before you trust
|-- UsageError         2  the request cannot be understood or carried out as asked
|   |-- UnrecognisedError    nothing here is a checkpoint that we know
|   |-- UnsupportedError     recognised, and refused: reshard cannot convert it (yet)
|   `-- ExistsError          the destination is taken
|-- CorruptError       3  a file lies about itself, or files contradict each other
|   `-- StaleError           files of another save lie among those of this one
|-- ResourceError      4  not enough memory or disk
`-- UnsafeError        5  refused: the input asks for code to run or for a path to escape
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator

INTERRUPTED = 130  # the exit code of what a signal ended

_MOST_SHOWN = 2000  # letters


class ReshardError(Exception):
    """Base of every error that reshard raises on purpose.

    Args:
        where: the file or directory (or tensor) that the message is about.
        problem: what was expected and what was found.
        remedy: what to do next; printed on a line of its own.
        output: the last lines of a program that failed.
    """

    exit_code = 2

    def __init__(
        self, where: object, problem: str, remedy: str = "", *, output: Iterable[str] = ()
    ) -> None:
        self.where = str(where)
        self.problem = problem
        self.remedy = remedy
        self.output = tuple(output)
        super().__init__(where, problem, remedy)

    @property
    def lines(self) -> list[str]:
        """The message, a line each; what came from a file may hold more line breaks."""
        shown = [
            f"{_shortened(self.where)}: {_shortened(self.problem)}",
            *(f"  {line}" for line in self.output),
        ]
        return [*shown, f"  -> {_shortened(self.remedy)}"] if self.remedy else shown

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _shortened(text: str) -> str:
    """Names come from files, and may have a million letters."""
    if len(text) <= _MOST_SHOWN:
        return text
    half = _MOST_SHOWN // 2
    return f"{text[:half]} [{len(text) - 2 * half} more letters] {text[-half:]}"


_LETTERS, _ITEMS, _BITS = 60, 8, 256  # of a value that is shown as it is


def shown(value: object) -> str:
    """A value of a file in a message: a short one as it is, of any other what it is.

    A pickle of a hundred bytes holds tuples of tuples whose text would have a billion letters.

    >>> shown([1, "a"]), shown({"a": 1}), shown(((1,), 2))
    ("[1, 'a']", 'a dict', 'a tuple')
    """
    row = isinstance(value, (list, tuple)) and len(value) <= _ITEMS
    parts = list(value) if row else [value]  # type: ignore[call-overload]
    if not all(map(_is_short, parts)):
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    text = repr(value)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


def _is_short(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _BITS
    if isinstance(value, (str, bytes)):
        return len(value) <= _MOST_SHOWN
    return value is None or isinstance(value, float)


def is_outside(error: BaseException) -> bool:
    """Whether the same run could succeed at another time: nothing is wrong with what it copies."""
    cause = error.__cause__ if isinstance(error, ReshardError) else error
    return isinstance(cause, (KeyboardInterrupt, MemoryError, OSError))


class IncompleteError(ReshardError):
    """A part of the checkpoint is missing."""

    exit_code = 1


class DifferentError(ReshardError):
    """A comparison that must hold does not."""

    exit_code = 1


class UsageError(ReshardError):
    """The request cannot be carried out as asked."""

    exit_code = 2


class UnrecognisedError(UsageError):
    """No known checkpoint format lies at this path."""


class UnsupportedError(UsageError):
    """The format is recognised, and this form of it is refused."""


class ExistsError(UsageError):
    """The destination exists, or lies inside the source."""


class CorruptError(ReshardError):
    """A file contradicts itself or its companions."""

    exit_code = 3


class StaleError(CorruptError):
    """Files of another save lie among those of this one."""


class ResourceError(ReshardError):
    """Memory or disk does not suffice."""

    exit_code = 4


class UnsafeError(ReshardError):
    """The input would run code or reach outside its directory."""

    exit_code = 5


@contextlib.contextmanager
def understood(where: object) -> Iterator[None]:
    """What a reader trips over is a file of another structure than its format's.

    Readers say what they expect where damage is likely. Any value of a pickle or a JSON file can
    be of any type, though, and what follows from that is no bug.

    Raises:
        CorruptError: with what went wrong as its cause.
    """
    try:
        yield
    except RecursionError as error:
        raise CorruptError(where, "its files or folders are nested too deep") from error
    except (
        *(ArithmeticError, AttributeError, LookupError, TypeError),
        *(ValueError, struct.error),
    ) as error:
        raise CorruptError(
            where,
            f"a file is not of the structure that its format has ({type(error).__name__}: {error})",
            "it was altered, or written by a version that reshard does not know; -v shows where",
        ) from error
