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
_NAMING = ("model_type", "architectures")
_INVERSE = {"rows": "vocab"}  # traits that follow from another
_ALIKE = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
_FIELD = re.compile(r"\{([a-z_]+)(\?)?\}")


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


def is_known(name: object) -> bool:
    """Whether it is a family's name, or a ``model_type`` of one."""
    return bool(_called(name))


def _called(name: object) -> list[Family]:
    return [f for f in families().values() if name in (f.name, f.config["model_type"])]


def need(traits: Traits, name: str | None = None) -> Family:
    """The family that the user names, else the one that fits.

    Raises:
        UsageError: there is none of that name.
        UnsupportedError: the model differs from it, or none fits; naming in what.
    """
    found = of_name(name) if name is not None else list(families().values())
    fits = next((family for family in found if not family.unlike(traits)), None)
    if fits is not None:
        return fits
    nearest = min(found, key=lambda family: len(family.unlike(traits)))
    differs = "; ".join(nearest.unlike(traits))
    if name is not None:
        raise UnsupportedError(
            traits.source,
            f"is no {name} model: {differs}",
            f"name another family with --family: {', '.join(families())}; or --names source",
        )
    raise UnsupportedError(
        traits.source,
        "is like no model of transformers that reshard has a table of; the nearest is"
        f" {nearest.name}, but {differs}",
        "keep the source's names with --names source",
    )


def of_name(name: str) -> list[Family]:
    """The families of a name, or of a config's ``model_type``.

    Raises:
        UsageError: there is none.
    """
    found = _called(name)
    if not found:
        raise UsageError(
            f"family {name!r}",
            f"is none that reshard has a table of: {', '.join(families())}",
            "name one whose names are the same with --family NAME",
        )
    return found


# The other way: traits of a config


def of_config(
    config: Mapping[str, Any], source: str, name: str | None = None
) -> tuple[Family, Traits]:
    """The family of a transformers config, every default filled in, and the model's traits.

    Args:
        name: of the family, where the user gives one; None: the config's ``model_type``.

    Raises:
        UsageError: there is no such family, or the config is of none.
        UnsupportedError: the config says what models of the family do not have.
    """
    found = of_name(name or str(config.get("model_type")))
    problems: list[str] = []
    for family in found:
        traits, odd = _traits(family, _flat(config), source)
        problems = [*odd, *family.unlike(traits)]
        if not problems:
            return family, traits
    raise UnsupportedError(
        source, f"is of no {found[-1].name} model as reshard knows it: {'; '.join(problems)}"
    )


def _traits(family: Family, config: Mapping[str, Any], source: str) -> tuple[Traits, list[str]]:
    """What a family's lines read in a config, and what they cannot."""
    own = {field.name for field in fields(Traits)}
    values: dict[str, Any] = {
        name: wanted
        for name, wanted in family.when.items()
        if name in own and wanted != _ANY and not isinstance(wanted, list)
    }
    odd, read = [], dict[str, Any]()
    for key, line in family.config.items():
        if key in _NAMING or key not in config:
            continue
        match = _FIELD.fullmatch(line) if isinstance(line, str) else None
        name = _INVERSE.get(match[1], match[1]) if match else ""
        value = _ALIKE.get(config[key], config[key]) if name == "activation" else config[key]
        known = read.get(name, value) if match else line
        if value != known:
            odd.append(f"{key} is {value}, not {known}")
        elif name in own:
            values[name] = read[name] = tuple(value) if isinstance(value, list) else value
    traits = Traits(source=source, **values)
    hidden, heads = traits.hidden, traits.heads
    return (
        replace(
            traits,
            groups=traits.groups or heads,
            head_dim=traits.head_dim or (hidden // heads if hidden and heads else None),
            ffn=traits.ffn or (4 * hidden if hidden else None),
        ),
        odd,
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the names that transformers before version 5 had."""
    flat = dict(config)
    if "num_local_experts" in flat:
        flat.setdefault("num_experts", flat["num_local_experts"])
    rope = flat.pop("rope_parameters", None)
    if isinstance(rope, Mapping):
        rest = dict(rope)
        theta, part = rest.pop("rope_theta", None), rest.pop("partial_rotary_factor", None)
        flat |= {key: theta for key in ("rope_theta", "rotary_emb_base") if theta is not None}
        flat |= {"rotary_pct": part} if part is not None else {}
        flat["rope_scaling"] = None if rest.get("rope_type") == "default" else rest
    return flat
