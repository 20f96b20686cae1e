"""What was chosen and by whom, so that two sources can be held against each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainer.errors import SettingsError


@dataclass(frozen=True)
class Choice:
    """A value of one setting, and the flag or field that gave it."""

    value: Any
    origin: str


class Choices:
    """Settings from several sources, each with its origin, and what is to be told about them.

    A stated value must agree with every other statement. An assumed one is what a framework does
    where its file says nothing: any statement overrides it.
    """

    def __init__(self) -> None:
        self._stated: dict[str, Choice] = {}
        self._assumed: dict[str, Choice] = {}
        self._limits: list[tuple[str, tuple[Any, ...], str]] = []
        self._notes: dict[str, list[str]] = {}

    def state(self, field: str, value: Any, origin: str) -> None:
        """Choose ``value``.

        Raises:
            SettingsError: another source chose another value.
        """
        new = Choice(value, origin)
        known = self._stated.setdefault(field, new)
        if known is not new and known.value != value:
            raise contradiction(field, known, new)

    def assume(self, field: str, value: Any, origin: str) -> None:
        """Take ``value`` unless somebody states one."""
        self._assumed.setdefault(field, Choice(value, origin))

    def limit(self, field: str, values: tuple[Any, ...], origin: str) -> None:
        """Let the choice be one of ``values`` in the end."""
        self._limits.append((field, values, origin))

    def stated(self, field: str) -> Choice | None:
        """What was stated so far."""
        return self._stated.get(field)

    def note(self, subject: str, detail: str) -> None:
        """Remember to tell that ``detail`` is of the kind ``subject``."""
        details = self._notes.setdefault(subject, [])
        if detail not in details:
            details.append(detail)

    @property
    def notes(self) -> str:
        """All notes in one paragraph, or an empty string."""
        return "; ".join(f"{subject}: {', '.join(some)}" for subject, some in self._notes.items())

    @property
    def values(self) -> dict[str, Any]:
        """Setting -> value.

        Raises:
            SettingsError: one is not among those that a source allows.
        """
        chosen = self._all()
        for field, values, origin in self._limits:
            if field in chosen and chosen[field].value not in values:
                raise contradiction(field, chosen[field], Choice(" or ".join(values), origin))
        return {name: choice.value for name, choice in chosen.items()}

    @property
    def origins(self) -> dict[str, str]:
        """Setting -> who chose it."""
        return {name: choice.origin for name, choice in self._all().items()}

    def _all(self) -> dict[str, Choice]:
        return {**self._assumed, **self._stated}


def contradiction(field: str, one: Choice, other: Choice) -> SettingsError:
    """The error for two sources that do not agree."""
    return SettingsError(
        f"{field} is {_shown(one.value)} by {one.origin}"
        f" and {_shown(other.value)} by {other.origin}",
        'make them agree, or set the one in the file to "auto"',
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
