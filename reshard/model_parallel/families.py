"""Families of Hugging Face's models: which one a model is, by which table, and its config.

A table's ``families`` name them by their ``model_type``. ``when`` states the `Traits` that a model
of the family has: a value, a list of possible values, or ``any`` for what its config states.
``config`` is its config.json, in which ``{trait}`` stands for the value of a trait, and
``{trait?}`` for one that may be null. ``neutral`` lists values of further keys that change nothing
(see `config_keys`). ``alike`` lists other model types of transformers that compute the same from
these keys: tests compare logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import isclose
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.model_parallel import config_keys, yarn
from reshard.model_parallel.rules import Table, load_document, load_table
from reshard.model_parallel.traits import Traits

# The first family that fits is chosen, so the most usual ones come first.
TABLES = ("llama", "mixtral", "qwen_moe", "gpt2", "gpt_neox", "bloom")
_META = "meta"
_ANY = "any"
_NAMING = ("model_type", "architectures")
_INVERSE = {"rows": "vocab"}  # traits that follow from another
_ALIKE = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
_ROPE = ("rope_theta", "partial_rotary_factor")
_SYNONYMS = (  # names of one key, the usual one first
    ("rope_theta", "rotary_emb_base"),
    ("partial_rotary_factor", "rotary_pct"),
    ("num_experts", "num_local_experts"),
)
_KEEP_NAMES = "convert to a format that keeps Hugging Face's names"
_FIELD = re.compile(r"\{([a-z_]+)(\?)?\}")


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of transformers model, and the table of its parameters' names."""

    name: str
    table: Table
    when: Mapping[str, Any]
    config: Mapping[str, Any]
    neutral: Mapping[str, Any] = field(default_factory=dict)
    alike: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """The ``model_type`` of its configs."""
        return str(self.config["model_type"])

    def find_mismatches(self, traits: Traits) -> list[str]:
        """Return the traits in which a model differs from this family, in words."""
        mismatches = [*traits.odd]
        for name, required in self.when.items():
            allowed = required if isinstance(required, list) else [required]
            value = getattr(traits, name)
            if value not in allowed and _ANY not in allowed:
                mismatches.append(f"{name} is {value}, not {' or '.join(map(str, allowed))}")
        return mismatches

    def make_config(self, traits: Traits) -> dict[str, Any]:
        """Return the config.json of a model of this family.

        Raises:
            UsageError: the source does not state a trait that the config needs.
        """
        return {key: _fill_line(key, value, traits) for key, value in self.config.items()}

    def differences(
        self, config: Mapping[str, Any], traits: Traits
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield each setting in which a config of this family differs from a model.

        A setting that only one of the two states is not compared.

        Args:
            config: a config.json, without the defaults of its class.

        Yields:
            The config's key, the model's value, and the config's.
        """
        flat = _flatten_config(config, self)
        for key, line in self.config.items():
            match = _FIELD.fullmatch(line) if isinstance(line, str) else None
            if key in _NAMING or key not in flat or (flat[key] is None and not _may_be_null(match)):
                continue
            value = getattr(traits, match[1]) if match else line
            is_stated = value is not None or (_may_be_null(match) and not traits.odd)
            if is_stated and not _is_same(value, flat[key], traits.max_positions):
                yield key, value, flat[key]


def _may_be_null(field_of_line: re.Match[str] | None) -> bool:
    """Return whether null is a value of a config's key, by the field of its line."""
    return field_of_line is not None and field_of_line[2] is not None


def _is_same(value: Any, other: Any, positions: int | None) -> bool:
    """Return whether two values of a config's key make the same model."""
    if isinstance(value, Mapping) or isinstance(other, Mapping):
        return _normalize_scaling(value, positions) == _normalize_scaling(other, positions)
    if isinstance(value, (int, float)) and isinstance(other, (int, float)):
        return isclose(value, other, rel_tol=1e-6)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(value) == list(other)
    return bool(_ALIKE.get(value, value) == _ALIKE.get(other, other))


def _normalize_scaling(value: Any, positions: int | None) -> dict[str, Any]:
    """Return a ``rope_scaling`` in a form that compares; empty for none.

    Args:
        positions: number of positions of the model, a default of YaRN.
    """
    stated = {key: each for key, each in (value or {}).items() if each is not None}
    kind = stated.pop("type", None)
    kind = stated.setdefault("rope_type", kind)
    if kind in (None, "default"):
        return {}
    return {"rope_type": kind} | (
        yarn.make_args(stated, positions) if kind == yarn.KIND else stated
    )


def _fill_line(key: str, value: Any, traits: Traits) -> Any:
    """Return the value of a config's key: a constant, or the trait that its line names."""
    match = _FIELD.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    trait = getattr(traits, match[1])
    if trait is None and not match[2]:
        raise UsageError(
            traits.source,
            f"does not state the model's {match[1]}, which its config needs ({key})",
            "give the config: --hf-dir DIR",
        )
    return dict(trait) if isinstance(trait, Mapping) else trait


@cache
def load_families() -> Mapping[str, Family]:
    """Return every family of a model that Megatron trains by name, the usual ones first."""
    return {family.name: family for table in TABLES for family in _parse_families(table)}


@cache
def load_meta_family() -> Family:
    """Return the family of Meta's Llama files."""
    return replace(load_families()["llama"], table=load_table(_META))


def _parse_families(name: str) -> Iterator[Family]:
    """Yield the families of a built-in table."""
    for model, section in load_document(name)["families"].items():
        yield Family(
            model,
            load_table(name),
            section["when"],
            section["config"],
            section.get("neutral", {}),
            tuple(section.get("alike", ())),
        )


def is_known(name: object) -> bool:
    """Return whether a value is the name of a family, or a ``model_type`` of one."""
    return bool(_find_families(name))


def _find_families(name: object) -> list[Family]:
    """Return the families of a name or ``model_type``; none if it is unknown."""
    return [f for f in load_families().values() if name in (f.name, f.model_type)]


def choose_family(traits: Traits, name: str | None = None) -> Family:
    """Return the family that the user names, else the first that fits the model.

    Raises:
        UsageError: no family has that name.
        UnsupportedError: the model differs from the named family, or from all families.
    """
    families = get_families(name) if name is not None else list(load_families().values())
    fits = next((family for family in families if not family.find_mismatches(traits)), None)
    if fits is not None:
        return fits
    nearest = min(families, key=lambda family: len(family.find_mismatches(traits)))
    differs = "; ".join(nearest.find_mismatches(traits))
    if name is not None:
        raise UnsupportedError(
            traits.source,
            f"is not a {name} model: {differs}",
            f"name another family with --family: {', '.join(load_families())}; or --names source",
        )
    raise UnsupportedError(
        traits.source,
        f"matches no family that reshard has a table of; the nearest is {nearest.name}, but"
        f" {differs}",
        "keep the source's names with --names source",
    )


def get_families(name: str) -> list[Family]:
    """Return the families of a name, or of a config's ``model_type``.

    Raises:
        UsageError: no family has that name.
    """
    families = _find_families(name)
    if not families:
        raise UsageError(
            f"family {name!r}",
            f"is unknown: reshard has tables of {', '.join(load_families())}",
            "give one whose parameters have the same names: --family NAME",
        )
    return families


# The other way: traits of a config


def read_config(
    config: Mapping[str, Any],
    source: str,
    name: str | None = None,
    defaults_of: Callable[[str], Mapping[str, Any]] = lambda _: {},
) -> tuple[Family, Traits]:
    """Return the family of a transformers config, and the model's traits.

    Args:
        config: the config, with every default of its class filled in.
        name: name of the family from the user; None: the config's ``model_type``.
        defaults_of: function that returns the default config of a ``model_type``'s class.

    Raises:
        UsageError: no family has the name from the user.
        UnsupportedError: the config has settings that models of the family do not have.
    """
    model_type = str(config.get("model_type"))
    families = (
        get_families(name)
        if name is not None
        else _find_families(model_type) or _find_alike(model_type)
    )
    if not families:
        raise UnsupportedError(
            source,
            f"describes a {model_type} model, of which reshard has no table; it has tables of"
            f" {', '.join(load_families())}",
            _KEEP_NAMES,
        )
    nearest: tuple[Family, list[str]] | None = None
    for family in families:
        flat = _flatten_config(config, family)
        traits, odd = _read_traits(family, flat, source)
        if model_type not in (family.model_type, *family.alike):
            odd.append(f"model_type is {model_type!r}")
        defaults = _flatten_config(defaults_of(family.model_type), family)
        odd += config_keys.find_changing_keys(flat, family.config, family.neutral, defaults)
        problems = [*odd, *family.find_mismatches(traits)]
        if not problems:
            return family, traits
        if nearest is None or len(problems) < len(nearest[1]):
            nearest = family, problems
    assert nearest is not None
    raise UnsupportedError(
        source,
        f"describes a model that differs from {nearest[0].name}, or may differ: "
        + "; ".join(nearest[1]),
        f"{_KEEP_NAMES}; if one of these keys does not change what the model computes, delete it in"
        " a copy of the config and give the copy with --model",
    )


def _find_alike(model_type: str) -> list[Family]:
    """Return the families that compute what models of another ``model_type`` do."""
    return [family for family in load_families().values() if model_type in family.alike]


def _read_traits(
    family: Family, config: Mapping[str, Any], source: str
) -> tuple[Traits, list[str]]:
    """Return the traits in a config by a family's lines, and what contradicts the lines."""
    own = {field.name for field in fields(Traits)}
    # What `when` requires holds unless the config states it; `find_mismatches` compares the two.
    values: dict[str, Any] = {
        name: required
        for name, required in family.when.items()
        if name in own and required != _ANY and not isinstance(required, list)
    }
    odd, read = [], dict[str, Any]()
    for key, line in family.config.items():
        if key in _NAMING or key not in config:
            continue
        match = _FIELD.fullmatch(line) if isinstance(line, str) else None
        name = _INVERSE.get(match[1], match[1]) if match else ""
        value = _ALIKE.get(config[key], config[key]) if name == "activation" else config[key]
        known = read.get(name, value) if match else line
        # Keys that state the same trait must agree, and a constant must be met.
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


def _flatten_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a config under the key names of the family's table.

    transformers 5 keeps rotary positions in ``rope_parameters``, and calls the number of experts
    ``num_local_experts`` in every class.
    """
    flat = dict(config)
    rope = flat.pop("rope_parameters", None)
    if isinstance(rope, Mapping):
        rest = dict(rope)
        flat |= {key: rest.pop(key) for key in _ROPE if rest.get(key) is not None}
        flat["rope_scaling"] = None if rest == {"rope_type": "default"} else rest
    for names in _SYNONYMS:
        own = next((name for name in names if name in family.config), names[0])
        for name in names:
            if name in flat:
                flat.setdefault(own, flat[name])
                flat = {key: value for key, value in flat.items() if key != name or key == own}
    return flat
