"""Apply a table of rules to a configuration file: each rule says what a field means here.

A table maps the name of a field to a rule, and the name of a section to the table of the section. A
field that no table has is an error, which suggests the nearest known name.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.choices import Choices
from trainer.errors import SettingsError

Kind = Callable[[Any], Any]
"""Value in the file -> value of the setting; raises ValueError(what was expected)."""

OFF: tuple[Any, ...] = (None, False, 0, "", "auto", "none", (), [], {})
"""Values that switch a field off."""


@dataclass(frozen=True)
class Into:
    """The field sets these settings: none, one, or several if ``kind`` returns a tuple."""

    kind: Kind
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoEffect:
    """The field, or section with these ``fields``, does not change the training here."""

    fields: tuple[str, ...] = ()
    quiet: tuple[Any, ...] = (None,)
    """Values without a note."""


@dataclass(frozen=True)
class Only:
    """The field may have these values, which change nothing; any other value is refused."""

    why: str
    values: tuple[Any, ...] = OFF


Rule = Into | NoEffect | Only
Table = Mapping[str, "Rule | Table"]


def into(settings: str, kind: Kind) -> Into:
    """Return the rule for a field that sets the settings named, separated by spaces."""
    return Into(kind, tuple(settings.split()))


def without_effect(names: str, *quiet: Any) -> dict[str, Rule | Table]:
    """Return rules for fields that have no effect here; ``quiet`` values get no note."""
    return {name: NoEffect(quiet=(None, *quiet)) for name in names.split()}


def section(fields: str) -> NoEffect:
    """Return the rule for a section that has no effect here."""
    return NoEffect(tuple(fields.split()))


def refused(why: str, names: str) -> dict[str, Rule | Table]:
    """Return rules for fields that would change the training in a way that is not supported."""
    return {name: Only(why) for name in names.split()}


@dataclass
class Walk:
    """Reads one file into choices."""

    file: Path
    choices: Choices
    root: Table
    ignore_unknown: bool = False

    def origin(self, path: str) -> str:
        """Return the name of a field for messages."""
        return f"{path} in {self.file.name}"

    def fields(self, found: Any, table: Table, path: str = "") -> None:
        """Apply the rules of ``table`` to the section ``found`` at ``path``.

        Raises:
            SettingsError: an unknown field, a wrong type, a refused or a contradicting value.
        """
        for name in self._names(found, table, path):
            here = f"{path}.{name}" if path else name
            value, rule = found[name], table[name]
            if isinstance(rule, Mapping):
                if value is not None:
                    self.fields(value, rule, here)
            else:
                self._apply(rule, value, here)

    def _names(self, found: Any, known: Collection[str], path: str) -> list[str]:
        """Return the names of the known fields of a section; refuse or note the others."""
        if not isinstance(found, dict):
            raise self.wrong(path or "the file", "an object of named fields", found)
        for name in found:
            if name not in known:
                self._unknown(f"{path}.{name}" if path else str(name), str(name), known)
        return [name for name in found if name in known]

    def _apply(self, rule: Rule, value: Any, path: str) -> None:
        if isinstance(rule, Into):
            self._into(rule, value, path)
        elif isinstance(rule, Only):
            if value not in rule.values and not _disabled(value):
                raise self.refusal(path, value, rule.why)
        elif value not in rule.quiet:
            if rule.fields:
                self._names(value, rule.fields, path)
            if not _disabled(value):
                self.choices.note(f"{self.file.name}: no effect here", path)

    def _into(self, rule: Into, value: Any, path: str) -> None:
        if value is None or value == "auto":
            return
        try:
            converted = rule.kind(value)
        except ValueError as error:
            raise self.wrong(path, str(error), value) from None
        # A rule without settings only checks the value, so the lengths can differ.
        several = converted if len(rule.settings) > 1 else (converted,)
        for setting, each in zip(rule.settings, several, strict=False):
            self.choices.state(setting, each, self.origin(path))

    def _unknown(self, path: str, name: str, siblings: Collection[str]) -> None:
        if self.ignore_unknown:
            self.choices.note(f"{self.file.name}: unknown, ignored", path)
            return
        elsewhere = [known for known in _paths(self.root) if known.rpartition(".")[2] == name]
        near = elsewhere or difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        raise SettingsError(
            f"{self.file.name}: unknown field {path}",
            (f"did you mean {near[0]}? " if near else "") + "--ignore-unknown ignores it",
        )

    def wrong(self, path: str, expected: str, found: Any) -> SettingsError:
        """Return the error for a value of a wrong type or form."""
        shown = json.dumps(found, default=str)
        return SettingsError(
            f"{self.file.name}: {path}: expected {expected}, found {shown}",
            f"correct it in {self.file}",
        )

    def refusal(self, path: str, found: Any, why: str) -> SettingsError:
        """Return the error for a value that would change the training."""
        shown = json.dumps(found, default=str)
        return SettingsError(
            f"{self.file.name}: {path} is {shown}: {why}", "remove it from the file"
        )


def _disabled(value: Any) -> bool:
    return isinstance(value, dict) and value.get("enabled") is False


def _paths(table: Table, prefix: str = "") -> Iterator[str]:
    for name, rule in table.items():
        yield prefix + name
        if isinstance(rule, Mapping):
            yield from _paths(rule, f"{prefix}{name}.")
        elif isinstance(rule, NoEffect):
            yield from (f"{prefix}{name}.{field}" for field in rule.fields)


def read_text(file: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        SettingsError: the file is missing or is not text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"cannot read {file}: {reason}", "give a readable text file") from None


def number(value: Any) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("a number")
    return float(value)


def integer(value: Any) -> int:
    """Return a whole number; 5e8 is one."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value != value // 1
    ):
        raise ValueError("a whole number")
    return int(value)


def positive(value: Any) -> int:
    """Return a whole number of 1 or more."""
    try:
        whole = integer(value)
    except ValueError:
        whole = 0
    if whole < 1:
        raise ValueError("a whole number, 1 or more")
    return whole


def boolean(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - the walk turns it into a message
    return value


def text(value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise ValueError("text")  # noqa: TRY004
    return value


def one_of(allowed: Mapping[Any, Any] | Iterable[str]) -> Kind:
    """Return the kind that maps each allowed value to its meaning here, by default itself."""
    meanings = allowed if isinstance(allowed, Mapping) else {name: name for name in allowed}

    def kind(value: Any) -> Any:
        simple = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        if not simple or value not in meanings:
            raise ValueError("one of " + ", ".join(json.dumps(key) for key in meanings))
        return meanings[value]

    return kind
