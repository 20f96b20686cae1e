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


class ReshardError(Exception):
    """Base of every error that reshard raises on purpose.

    Args:
        where: the file or directory (or tensor) that the message is about.
        problem: what was expected and what was found.
        remedy: what to do next; printed on a line of its own.
    """

    exit_code = 2

    def __init__(self, where: object, problem: str, remedy: str = "") -> None:
        self.where = str(where)
        self.problem = problem
        self.remedy = remedy
        super().__init__(where, problem, remedy)

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}"
        return f"{text}\n  -> {self.remedy}" if self.remedy else text


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
