"""Names with fields, as the tables write them: ``decoder.layers.{i}.mlp.linear_fc1.{p}``.

A field of one letter stands for a number, ``{p}`` for the last component of a name (weight, bias),
``{i+2}`` for the number ``i`` plus two, because the two sides count from different starts,
``{layers+2}`` for a number that follows from the size of the model, ``{m+layers}`` for both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_FIELD = re.compile(r"\{([a-z]+)([+-](?:\d+|[a-z]+))?\}")
_DIGITS = re.compile(r"\d+")
_WORD = "p"  # the only field that is not a number

Fields = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name, or a family of names that differ in numbers."""

    text: str

    @property
    def fields(self) -> frozenset[str]:
        """Names of its fields."""
        return frozenset(match[1] for match in _FIELD.finditer(self.text))

    def match(self, name: str, constants: Mapping[str, int]) -> dict[str, str | int] | None:
        """Return the values of the fields that make the pattern this name, or None.

        Args:
            constants: fields whose values the model gives.
        """
        compiled, fields = _compile(self.text)
        match = compiled.fullmatch(name)
        if match is None:
            return None
        values: dict[str, str | int] = {}
        for text, (field, offset) in zip(match.groups(), fields, strict=True):
            added = _find_offset(offset, constants)
            if added is None:
                return None
            value: str | int = text if field == _WORD else int(text) - added
            # A field that occurs twice, or that the model gives, has the same value everywhere.
            known = constants.get(field, values.get(field, value))
            if known != value or (isinstance(value, int) and value < 0):
                return None
            if field not in constants:
                values[field] = value
        return values

    @property
    def group(self) -> str | None:
        """The `make_group_key` of every name that matches; None if they have different keys."""
        # A word inside the name can be any text, so no single key covers the names.
        if f"{{{_WORD}}}" in self.text.rpartition(".")[0]:
            return None
        return make_group_key(_FIELD.sub("0", self.text))

    def fill(self, values: Fields) -> str:
        """Return the name that these values make; raise KeyError for a field without a value."""

        def one(field: re.Match[str]) -> str:
            value = values[field[1]]
            if not isinstance(value, int):
                return value
            added = _find_offset(field[2] or "", values)
            if added is None:
                raise KeyError(field[2])
            return str(value + added)

        return _FIELD.sub(one, self.text)


def make_group_key(name: str) -> str:
    """Return a name without its last component and its numbers; few patterns share a key.

    >>> make_group_key("decoder.layers.12.mlp.linear_fc1.weight")
    'decoder.layers.#.mlp.linear_fc#'
    """
    return _DIGITS.sub("#", name.rpartition(".")[0])


def _find_offset(text: str, values: Fields) -> int | None:
    """Return the number that a field adds, e.g. of ``+2`` or ``+layers``; None if it is unknown."""
    sign, word = -1 if text.startswith("-") else 1, text[1:]
    number = int(word or 0) if not word.isalpha() else values.get(word)
    return sign * number if isinstance(number, int) else None


@cache
def _compile(text: str) -> tuple[re.Pattern[str], tuple[tuple[str, str], ...]]:
    at, parts, fields = 0, [], []
    for field in _FIELD.finditer(text):
        parts.append(re.escape(text[at : field.start()]))
        # A word is matched lazily, so that it ends where a number behind it begins.
        parts.append(r"([^.]+?)" if field[1] == _WORD else r"(\d{1,9})")
        fields.append((field[1], field[2] or ""))
        at = field.end()
    return re.compile("".join([*parts, re.escape(text[at:])])), tuple(fields)
