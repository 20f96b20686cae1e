"""Chosen settings and where each comes from, so that two sources can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainer.core.errors import SettingsError


@dataclass(frozen=True)
class Choice:
    """A value of one setting, and the flag or field that it comes from."""

    value: Any
    origin: str


class Choices:
    """Settings from several sources, each with its origin, and the notes about them.

    A stated value must agree with every other statement. An assumed value is what a framework does
    if its file leaves a field out: any statement overrides it.
    """

    def __init__(self) -> None:
        self._stated: dict[str, Choice] = {}
        self._assumed: dict[str, Choice] = {}
        self._limits: list[tuple[str, tuple[Any, ...], str]] = []
        self._notes: dict[str, list[str]] = {}

    def state(self, field: str, value: Any, origin: str) -> None:
        """Set ``value`` by a statement.

        Raises:
            SettingsError: another source chose another value.
        """
        new = Choice(value, origin)
        known = self._stated.setdefault(field, new)
        if known is not new and known.value != value:
            raise make_contradiction(field, known, new)

    def assume(self, field: str, value: Any, origin: str) -> None:
        """Set ``value`` unless there is a statement."""
        self._assumed.setdefault(field, Choice(value, origin))

    def limit(self, field: str, values: tuple[Any, ...], origin: str) -> None:
        """Require that the resulting value is one of ``values``."""
        self._limits.append((field, values, origin))

    def stated(self, field: str) -> Choice | None:
        """Return the statement for a setting, or None."""
        return self._stated.get(field)

    def note(self, subject: str, detail: str) -> None:
        """Add ``detail`` to the note with the heading ``subject``."""
        details = self._notes.setdefault(subject, [])
        if detail not in details:
            details.append(detail)

    @property
    def notes(self) -> str:
        """All notes in one paragraph, or an empty string."""
        return "; ".join(f"{subject}: {', '.join(some)}" for subject, some in self._notes.items())

    @property
    def values(self) -> dict[str, Any]:
        """The values by setting.

        Raises:
            SettingsError: a value is not among those that a source allows.
        """
        chosen = self._all()
        for field, values, origin in self._limits:
            if field in chosen and chosen[field].value not in values:
                raise make_contradiction(field, chosen[field], Choice(" or ".join(values), origin))
        return {name: choice.value for name, choice in chosen.items()}

    @property
    def origins(self) -> dict[str, str]:
        """The origins by setting."""
        return {name: choice.origin for name, choice in self._all().items()}

    def _all(self) -> dict[str, Choice]:
        return {**self._assumed, **self._stated}


def make_contradiction(field: str, one: Choice, other: Choice) -> SettingsError:
    """Return the error for two sources that disagree."""
    return SettingsError(
        f"{field} is {_format(one.value)} by {one.origin}"
        f" and {_format(other.value)} by {other.origin}",
        'make them agree, or set the one in the file to "auto"',
    )


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
