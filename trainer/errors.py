"""What can go wrong, each with a stable exit code.

TrainerError
|-- SettingsError     2  the settings contradict each other, or the command line is wrong
|-- CheckpointError   3  a checkpoint is missing, incomplete, or of another shape
`-- TrainingError     1  training cannot go on: NaN loss, a dead rank, a full disk
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error that the trainer raises on purpose.

    Args:
        problem: what was expected and what was found.
        remedy: what to do next; printed on a line of its own.
        one_rank: only this rank knows, so this rank must say it.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str = "", *, one_rank: bool = False) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy
        self.one_rank = one_rank

    def __str__(self) -> str:
        return f"{self.problem}\n  -> {self.remedy}" if self.remedy else self.problem


def first_line(error: Exception) -> str:
    """The first line of somebody else's message, or the error's class when it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class SettingsError(TrainerError):
    """The settings contradict each other or cannot be understood."""

    exit_code = 2


class CheckpointError(TrainerError):
    """A checkpoint cannot be found, read or used as it is."""

    exit_code = 3


class TrainingError(TrainerError):
    """Training cannot go on."""

    exit_code = 1
