"""The error tree. Each class stands for one reaction of the caller, with a stable exit code.

ReshardError
|-- IncompleteError    1  a required part is missing: fetch it or save it again
|-- DifferentError     1  a check found different values: investigate before you use the output
|-- UsageError         2  the request is invalid or cannot be carried out
|   |-- UnrecognisedError    the path is not a known checkpoint
|   |-- UnsupportedError     the checkpoint is recognised, but reshard cannot convert it (yet)
|   `-- ExistsError          the destination already exists
|-- CorruptError       3  a file is damaged, or files contradict each other
|   `-- StaleError           files of different saves are mixed
|-- ResourceError      4  not enough memory or disk
|-- UnsafeError        5  the input asks to run code, or names a path outside its directory
`-- NotRunError        6  a program that a check needs did not run to its end: no verdict
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator

INTERRUPTED = 130  # exit code after a signal

# Advice that several readers give.
MIXED = "files of different runs or steps are mixed: fetch the checkpoint again as a whole"
TWO_RUNS = "files of two runs are mixed: move those of the other run away"
ALTERED = "the file was altered: fetch it again"
OTHER_FILE = "another file has this name, or the file was altered: fetch it again"
DAMAGED = "the file is truncated or was altered: fetch it again"
SAVE_NAMES = (
    "save again from the training script with an optimizer that stores names,"
    " Optimizer(model.named_parameters())"
)
REQUEST_PERMISSION = "request read permission, or copy it"
FETCH_MISSING = (
    "copy the missing files here (a node-local disk may still hold them), or pass the directory of"
    " the node that has them as a second source"
)

_MOST_SHOWN = 2000  # characters of a text in a message


class ReshardError(Exception):
    """The base of every error that reshard raises on purpose.

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
        """The message line by line; text from a file may contain further line breaks."""
        shown = [
            f"{cut_middle(self.where)}: {cut_middle(self.problem)}",
            *(f"  {line}" for line in self.output),
        ]
        return [*shown, f"  -> {cut_middle(self.remedy)}"] if self.remedy else shown

    def __str__(self) -> str:
        return "\n".join(self.lines)


def cut_middle(text: str, most: int = _MOST_SHOWN) -> str:
    """Return a text without its middle if it is long: a file may have a name of a megabyte."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [{len(text) - 2 * half} more characters] {text[-half:]}"


_CHARACTERS, _ITEMS, _BITS = 60, 8, 256  # limits for a value that is shown as it is


def shown(value: object) -> str:
    """Return a value of a file as text for a message: a short value itself, else its type.

    A pickle of a hundred bytes can contain tuples of tuples whose text would have a billion
    characters.

    >>> shown([1, "a"]), shown({"a": 1}), shown(((1,), 2))
    ("[1, 'a']", 'a dict', 'a tuple')
    """
    is_short_row = isinstance(value, (list, tuple)) and len(value) <= _ITEMS
    parts = list(value) if is_short_row else [value]  # type: ignore[call-overload]
    if not all(map(_is_short, parts)):
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    text = repr(value)
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 3]}..."


def _is_short(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _BITS
    if isinstance(value, (str, bytes)):
        return len(value) <= _MOST_SHOWN
    return value is None or isinstance(value, float)


def has_external_cause(error: BaseException) -> bool:
    """Return whether the machine or the user caused an error, so that another run may succeed."""
    cause = error.__cause__ if isinstance(error, ReshardError) else error
    return isinstance(cause, (KeyboardInterrupt, MemoryError, OSError))


class IncompleteError(ReshardError):
    """A part of the checkpoint is missing."""

    exit_code = 1


class DifferentError(ReshardError):
    """A comparison found a difference where none may be."""

    exit_code = 1


class UsageError(ReshardError):
    """The request is invalid or cannot be carried out."""

    exit_code = 2


class UnrecognisedError(UsageError):
    """The path is not a checkpoint of a known format."""


class UnsupportedError(UsageError):
    """The format is recognised, but this variant of it is not supported."""


class ExistsError(UsageError):
    """The destination exists, or is inside the source."""


class CorruptError(ReshardError):
    """A file contradicts itself or its companions."""

    exit_code = 3


class StaleError(CorruptError):
    """Files of another save are mixed with those of this one."""


class ResourceError(ReshardError):
    """There is not enough memory or disk space."""

    exit_code = 4


class UnsafeError(ReshardError):
    """The input would run code, or names a path outside its directory."""

    exit_code = 5


class NotRunError(ReshardError):
    """A program that a check starts did not run to its end, so the check has no verdict."""

    exit_code = 6


_STRUCTURE_ERRORS = (  # what Python raises for a value of an unexpected type or size
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)
NOT_UNDERSTOOD = "a file does not have the structure of its format"


@contextlib.contextmanager
def understood(where: object) -> Iterator[None]:
    """Raise a `CorruptError` in place of Python's errors about the structure of a value.

    Readers check values where damage is likely. Any value of a pickle or a JSON file can have any
    type, though, and the Python error that follows is not a bug of the reader.

    Raises:
        CorruptError: with the Python error as its cause.
    """
    try:
        yield
    except RecursionError as error:
        raise CorruptError(
            where, "its files or folders are nested too deeply for Python"
        ) from error
    except _STRUCTURE_ERRORS as error:
        raise CorruptError(
            where,
            f"{NOT_UNDERSTOOD} ({type(error).__name__}: {error})",
            "it was altered, or written by a version that reshard does not support; pass -v to see"
            " the place in the code",
        ) from error
