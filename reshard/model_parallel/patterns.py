"""Names with fields, as the tables write them: ``decoder.layers.{i}.mlp.linear_fc1.{p}``.

A field of one letter stands for a number, ``{p}`` for the last component of a name (weight, bias),
``{i+2}`` for a number that the other side counts from two less, and ``{layers+2}`` for one that the
model's size gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_FIELD = re.compile(r"\{([a-z]+)([+-]\d+)?\}")
_WORD = "p"  # the one field that is no number

Fields = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Pattern:
    """One name, or many that differ in numbers."""

    text: str

    @property
    def fields(self) -> frozenset[str]:
        """The names of its fields."""
        return frozenset(match[1] for match in _FIELD.finditer(self.text))

    def match(self, name: str, constants: Mapping[str, int]) -> dict[str, str | int] | None:
        """The fields' values that make the pattern this name; None where none do.

        Args:
            constants: fields that are known beforehand.
        """
        found = _compiled(self.text).fullmatch(name)
        if found is None:
            return None
        values: dict[str, str | int] = {}
        for at, field in enumerate(_FIELD.finditer(self.text), 1):
            word = found[at]
            value: str | int = word if field[1] == _WORD else int(word) - int(field[2] or 0)
            known = constants.get(field[1], values.get(field[1], value))
            if known != value or (isinstance(value, int) and value < 0):
                return None
            if field[1] not in constants:
                values[field[1]] = value
        return values

    def fill(self, values: Fields) -> str:
        """The name that these values make; a field without one is a KeyError."""

        def one(field: re.Match[str]) -> str:
            value = values[field[1]]
            return str(value + int(field[2] or 0)) if isinstance(value, int) else value

        return _FIELD.sub(one, self.text)


@cache
def _compiled(text: str) -> re.Pattern[str]:
    at, parts = 0, []
    for field in _FIELD.finditer(text):
        parts.append(re.escape(text[at : field.start()]))
        parts.append(r"([^.]+)" if field[1] == _WORD else r"(\d{1,9})")
        at = field.end()
    return re.compile("".join([*parts, re.escape(text[at:])]))
