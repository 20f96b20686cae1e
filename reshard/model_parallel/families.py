"""Families of Hugging Face's models: which one a model is, by which table, and its config.

A table's ``families`` name them by their ``model_type``. ``when`` says which `Traits` a model of
the family has, a list for one of several, ``any`` for what its config says; ``config`` is its
config.json, in which ``{trait}`` stands for the value of a trait, ``{trait?}`` for one that may be
null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.model_parallel.rules import Table, builtin, builtin_document
from reshard.model_parallel.traits import Traits

TABLES = ("llama", "mixtral", "qwen_moe", "gpt2", "gpt_neox", "bloom")  # the more usual first
_META = "meta"
_ANY = "any"
_FIELD = re.compile(r"\{([a-z_]+)(\?)?\}")
_REMEDY = "name the one that it is with --family NAME, or keep the source's names: --names source"


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model in transformers, and how its parameters are found in a source's."""

    name: str
    table: Table
    when: Mapping[str, Any]
    config: Mapping[str, Any]

    def unlike(self, traits: Traits) -> list[str]:
        """In what a model differs from this family; nothing if it is of it."""
        found = [*traits.odd]
        for name, wanted in self.when.items():
            allowed = wanted if isinstance(wanted, list) else [wanted]
            value = getattr(traits, name)
            if value not in allowed and _ANY not in allowed:
                found.append(f"{name} is {value}, not {' or '.join(map(str, allowed))}")
        return found

    def config_of(self, traits: Traits) -> dict[str, Any]:
        """The config.json of such a model.

        Raises:
            UsageError: the source does not say what it needs.
        """
        return {key: _filled(key, value, traits) for key, value in self.config.items()}


def _filled(key: str, value: Any, traits: Traits) -> Any:
    match = _FIELD.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    found = getattr(traits, match[1])
    if found is None and not match[2]:
        raise UsageError(
            traits.source,
            f"does not say the model's {match[1]}, which its config needs ({key})",
            "give the config: --hf-dir DIR",
        )
    return dict(found) if isinstance(found, Mapping) else found


@cache
def families() -> Mapping[str, Family]:
    """Every family of a model that Megatron trains, by name, the more usual ones first."""
    return {family.name: family for table in TABLES for family in _of_table(table)}


@cache
def meta() -> Family:
    """Llama, of Meta's own files."""
    return replace(families()["llama"], table=builtin(_META))


def _of_table(name: str) -> Iterator[Family]:
    for model, section in builtin_document(name)["families"].items():
        when, config = section["when"], section["config"]
        yield Family(model, builtin(name), when, config)


def named(name: str) -> Family:
    """A family by name.

    Raises:
        UsageError: there is none.
    """
    known = families()
    if name not in known:
        raise UsageError(f"--family {name}", f"is none of {', '.join(known)}")
    return known[name]


def fitting(traits: Traits) -> Family | None:
    """The family that a model is of, by its traits."""
    return next((f for f in families().values() if not f.unlike(traits)), None)


def need(traits: Traits, name: str | None = None) -> Family:
    """The family that the user names, else the one that fits.

    Raises:
        UnsupportedError: it differs, or none fits; naming in what.
    """
    if name is not None:
        family = named(name)
        problems = family.unlike(traits)
        if problems:
            raise UnsupportedError(
                traits.source,
                f"is no {name} model: {'; '.join(problems)}",
                f"{_REMEDY.partition(',')[0]} of {', '.join(families())}",
            )
        return family
    found = fitting(traits)
    if found is not None:
        return found
    nearest = min(families().values(), key=lambda f: len(f.unlike(traits)))
    raise UnsupportedError(
        traits.source,
        "is like no model of transformers that reshard has a table of; the nearest is"
        f" {nearest.name}, but {'; '.join(nearest.unlike(traits))}",
        _REMEDY,
    )


def fields_of(config: Mapping[str, Any]) -> list[str]:
    """The traits that a config names."""
    matches = (_FIELD.fullmatch(value) for value in config.values() if isinstance(value, str))
    return [match[1] for match in matches if match]


def trait_names() -> frozenset[str]:
    """What ``when`` and ``config`` may name."""
    own = {field.name for field in fields(Traits)}
    own |= {name for name, value in vars(Traits).items() if isinstance(value, property)}
    return frozenset(own)


def of_model_type(name: str) -> Family:
    """The family of a config's ``model_type``.

    Raises:
        UnsupportedError: there is none.
    """
    found = families().get(name)
    if found is None:
        raise UnsupportedError(
            f"model_type {name!r}",
            f"is none that reshard has a table of: {', '.join(families())}",
            "name one whose names are the same with --family NAME",
        )
    return found
