"""Errors of the trainer, each with a stable exit code.

TrainerError
|-- SettingsError     2  the settings contradict each other, or the command line is wrong
|-- CheckpointError   3  a checkpoint is missing, incomplete, or has another shape
|   `-- LayoutError        the run's own reader does not read its layout
`-- TrainingError     1  training cannot continue: NaN loss, a dead rank, a full disk
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error that the trainer raises on purpose.

    Args:
        problem: what was expected and what was found.
        remedy: what to do next; printed on a line of its own.
        one_rank: only this rank has the error, so this rank must print it.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str = "", *, one_rank: bool = False) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy
        self.one_rank = one_rank

    def __str__(self) -> str:
        return f"{self.problem}\n  -> {self.remedy}" if self.remedy else self.problem


def get_first_line(error: Exception) -> str:
    """Return the first line of a foreign error's message, or its class if the message is empty."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class SettingsError(TrainerError):
    """The settings contradict each other or cannot be understood."""

    exit_code = 2


class CheckpointError(TrainerError):
    """A checkpoint cannot be found, read or used as it is."""

    exit_code = 3


class LayoutError(CheckpointError):
    """The run's own reader does not read the layout of a checkpoint: `any_format` converts it."""


class TrainingError(TrainerError):
    """Training cannot continue."""

    exit_code = 1
