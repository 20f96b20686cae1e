"""Families of Hugging Face's models: which one a model is, by which table, and its config.

A family is data: a section of a table's ``families``. ``when`` states the `Traits` that a model of
the family has: a value, a list of possible values, or ``any`` for what its config states. A family
that states nothing of a trait in `Traits.usual` has the usual value.
``config`` is its config.json and ``args`` are its arguments of Megatron, besides those that
`megatron_traits` makes of every model's traits; both have constants, and fields that stand for
traits (see `fields`). ``neutral`` lists values of further keys of the config that change nothing,
``neutral_args`` of further arguments (see `config_keys`). ``equal`` has fields whose value must be
a given one. ``builder`` names the program that builds the model if Megatron-core has no modules
for it, and ``differs`` states what these modules compute differently, which a conversion reports.
``alike`` lists other model types of transformers that compute the same from these keys: tests
compare logits.

The built-in families are those of every table in ``tables/``; a user's file adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from reshard.core import schema
from reshard.core.schema import TEXT, mapping, sequence
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.model_parallel import config_keys, fields, megatron_traits, rules, yarn
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.traits import OWN, Traits

# Arguments of our own: the program that builds such models, and what it computes differently.
BUILDER, DIFFERS = "model_builder", "model_builder_differs"
_ANY = "any"
_NAMING = ("model_type", "architectures")
_ROPE = ("rope_theta", "partial_rotary_factor")
_LAYER_ROPES = ("full_attention", "sliding_attention")  # keys of positions that differ by layer
_SYNONYMS = (  # names of one key, the usual one first
    ("rope_theta", "rotary_emb_base"),
    ("partial_rotary_factor", "rotary_pct"),
    ("num_experts", "num_local_experts"),
)
_SECTIONS = {
    **dict.fromkeys(("when", "config", "args", "equal"), mapping(TEXT)),
    **dict.fromkeys(("neutral", "neutral_args"), config_keys.NEUTRAL),
    "alike": sequence(),
    **dict.fromkeys(("builder", "differs"), TEXT),
}
_SECTION = schema.fields(**_SECTIONS)
_KEEP_NAMES = "convert to a format that keeps Hugging Face's names"


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of transformers model, and the table of its parameters' names."""

    name: str
    table: Table
    when: Mapping[str, Any]
    config: Mapping[str, Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    neutral_args: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, Any] = field(default_factory=dict)
    alike: tuple[str, ...] = ()
    builder: str = ""
    differs: str = ""

    @property
    def model_type(self) -> str:
        """The ``model_type`` of its configs."""
        return str(self.config["model_type"])

    def find_mismatches(self, traits: Traits) -> list[str]:
        """Return the traits in which a model differs from this family, in words."""
        own = self.complete(traits)
        mismatches = [*traits.unsupported, *self._find_unusual(own)]
        for name, required in self.when.items():
            allowed = required if isinstance(required, list) else [required]
            value = own.get(name)
            if value not in allowed and _ANY not in allowed:
                mismatches.append(f"{name} is {value}, not {' or '.join(map(str, allowed))}")
        for text, required in self.equal.items():
            line = fields.parse_field(text)
            value = line.fill_if_known(own) if line else None
            if value != required:
                mismatches.append(f"{text.strip('{}')} is {value}, not {required}")
        if traits.args is not None:
            mismatches += self._find_odd_args(traits.args)
        return mismatches

    def _find_unusual(self, traits: Traits) -> Iterator[str]:
        lines = map(fields.parse_field, self.config.values())
        stated = {*self.when, *(line.trait for line in lines if line is not None)}
        for name, usual in traits.usual.items():
            value = traits.get(name)
            if name not in stated and None not in (value, usual) and value != usual:
                yield f"{name} is {value}, not {usual}"

    def _find_odd_args(self, args: Mapping[str, Any]) -> Iterator[str]:
        yield from config_keys.find_changing_args(args, self.args, self.neutral_args)
        for name, line in self.args.items():
            value = config_keys.get_default_arg(name) if args.get(name) is None else args[name]
            if fields.parse_field(line) is None and value != line:
                yield f"{name} is {value}, not {line}"
        yield from self._find_contradictions(args)

    def _find_contradictions(self, args: Mapping[str, Any]) -> Iterator[str]:
        """Yield the arguments that state one trait, which has a value a layer, and disagree."""
        lists: dict[str, dict[str, Any]] = {}
        for name, text in self.args.items():
            line = fields.parse_field(text)
            if line is not None and line.form in fields.LISTS:
                value = args.get(name)
                read = None if value is None else line.read(value, lambda _: None)
                lists.setdefault(line.own, {})[name] = read
        for stated in lists.values():
            if len(set(stated.values())) > 1:
                yield f"{' and '.join(stated)} do not fit together"

    def complete(self, traits: Traits) -> Traits:
        """Return the traits of a model with those that the family's arguments state."""
        for _, line, value in fields.list_fields(self.args, traits.args or {}):
            traits = traits.with_values({line.own: line.read(value, traits.get)})
        if traits.rope_scaling and fields.KIND not in traits.rope_scaling:
            # The file states the defaults of a scaling that is not in use.
            return replace(traits, rope_scaling=None)
        return traits

    def make_config(self, traits: Traits) -> dict[str, Any]:
        """Return the config.json of a model of this family."""
        return _fill(self.config, traits)

    def make_args(self, traits: Traits) -> dict[str, Any]:
        """Return the arguments with which Megatron-core builds a model of this family."""
        items: dict[str, set[str]] = {}
        for line in filter(None, map(fields.parse_field, self.args.values())):
            if line.item:
                items.setdefault(line.trait, set()).add(line.item)
        own = _fill(self.args, traits)
        for trait, known in items.items():
            _refuse_other_items(traits, trait, known)
            traits = traits.with_values({trait: None})  # the family's lines state all of it
        stated = {BUILDER: self.builder, DIFFERS: self.differs}
        built = {name: value for name, value in stated.items() if value}
        return megatron_traits.make_args(traits) | own | built

    def find_differences(
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
            parsed = fields.parse_field(line)
            may_be_null = parsed is not None and parsed.is_optional
            if key in _NAMING or key not in flat or (flat[key] is None and not may_be_null):
                continue
            value = line if parsed is None else parsed.fill_if_known(traits)
            is_stated = value is not None or (may_be_null and not traits.unsupported)
            if is_stated and not self._is_same(value, flat[key], traits.max_positions):
                yield key, value, flat[key]

    def _is_same(self, value: Any, other: Any, positions: int | None) -> bool:
        if isinstance(value, Mapping) or isinstance(other, Mapping):
            # If the arguments state each mscale of YaRN, one of them also scales the softmax.
            lines = filter(None, map(fields.parse_field, self.args.values()))
            states_items = any(line.item for line in lines)
            normal = yarn.make_args if states_items else yarn.normalize
            one, two = (_normalize_scaling(form, positions, normal) for form in (value, other))
            return one == two
        if isinstance(value, (int, float)) and isinstance(other, (int, float)):
            return isclose(value, other, rel_tol=1e-6)
        if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
            return list(value) == list(other)
        return bool(fields.normalize_name(value) == fields.normalize_name(other))


def _fill(lines: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    parsed = {key: fields.parse_field(line) for key, line in lines.items()}
    return {
        key: line if (of := parsed[key]) is None else of.fill(key, traits)
        for key, line in lines.items()
    }


def _refuse_other_items(traits: Traits, trait: str, known: set[str]) -> None:
    stated = {key: value for key, value in (traits.get(trait) or {}).items() if value is not None}
    stated.pop("type", None)  # an older name of rope_type
    if stated.keys() - known:
        name = min(stated.keys() - known)
        raise UnsupportedError(
            traits.source,
            "has features that Megatron-core does not support in this family:"
            f" {trait} with {name} {stated[name]!r}",
        )


def _normalize_scaling(
    value: Any,
    positions: int | None,
    normalize_yarn: Callable[[Mapping[str, Any], int | None], dict[str, Any]],
) -> dict[str, Any]:
    """Return a ``rope_scaling`` in a form that compares; empty for none."""
    stated = {key: setting for key, setting in (value or {}).items() if setting is not None}
    kind = stated.pop("type", None)
    kind = stated.setdefault("rope_type", kind)
    if kind in (None, "default"):
        return {}
    is_yarn = kind == yarn.KIND and not yarn.list_obstacles(stated, positions, 1.0)
    return {"rope_type": kind} | (normalize_yarn(stated, positions) if is_yarn else stated)


@cache
def load_families(path: Path | None = None) -> Mapping[str, Family]:
    """Return every family of a model that Megatron trains by name, in the order of their choice.

    The families of a user's file come first, then those of every table. A table comes before the
    tables that extend it, as a model of the plainer family may fit the others too.

    Args:
        path: a user's file of rules, which may have families of its own.
    """
    tables = [name for name in rules.list_tables() if "families" in rules.load_document(name)]
    found = [] if path is None else list(_parse_user_families(path))
    for name in sorted(tables, key=lambda name: (len(rules.list_bases(name)), name)):
        found += _parse_families(rules.load_document(name), rules.load_table(name), name)
    families: dict[str, Family] = {}
    for family in found:
        families.setdefault(family.name, family)
    return families


@cache
def load_renamed_family(name: str, table: str | Path) -> Family:
    """Return a family under the names that another format's table has for its parameters."""
    return replace(load_families()[name], table=rules.load_table(table))


def _parse_user_families(path: Path) -> Iterator[Family]:
    """Yield the families of a user's file, whose lines precede those of the table it extends."""
    document = rules.parse_document(path.read_text(errors="replace"), str(path))
    if "families" in document:
        base = rules.load_base(document, str(path))
        yield from _parse_families(document, rules.add_user_rules(base, path), str(path))


def _parse_families(document: Mapping[str, Any], table: Table, source: str) -> Iterator[Family]:
    for model, section in document.get("families", {}).items():
        if not {"when", "config"} <= section.keys() <= _SECTIONS.keys():
            raise UsageError(
                source,
                f"family {model!r} must have the sections 'when' and 'config', and no other"
                f" sections than {', '.join(sorted(_SECTIONS))}",
            )
        rules.refuse_malformed(source, section, _SECTION, f"families[{model!r}]")
        if "model_type" not in section["config"]:
            raise UsageError(source, f"family {model!r} has no model_type in its config")
        lines = {key: _drop_null(section.get(key, {})) for key in ("config", "args")}
        alike = tuple(map(str, section.get("alike", ())))
        yield Family(name=str(model), table=table, **{**section, **lines, "alike": alike})


def _drop_null(lines: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lines but those that are null, with which a family cancels lines it has merged."""
    return {key: line for key, line in lines.items() if line is not None}


def is_known(name: object, path: Path | None) -> bool:
    """Return whether a value is the name of a family, or a ``model_type`` of one."""
    return bool(_find_families(name, path))


def find_base_type(model_type: object, path: Path | None) -> str | None:
    """Return the ``model_type`` of a family that computes what models of another one do."""
    alike = _find_alike(str(model_type), path)
    return alike[0].model_type if alike else None


def _find_families(name: object, path: Path | None) -> list[Family]:
    return [f for f in load_families(path).values() if name in (f.name, f.model_type)]


def choose_family(
    traits: Traits, name: str | None = None, path: Path | None = None
) -> tuple[Family, Traits]:
    """Return the family that the user names, else the first that fits the model.

    The model's traits are completed by what the family's arguments state.

    Args:
        path: a user's file of rules.

    Raises:
        UsageError: no family has that name.
        UnsupportedError: the model differs from the named family, or from all families.
    """
    families = get_families(name, path) if name is not None else list(load_families(path).values())
    fits = next((family for family in families if not family.find_mismatches(traits)), None)
    if fits is not None:
        return fits, fits.complete(traits)
    nearest = min(families, key=lambda family: len(family.find_mismatches(traits)))
    differs = "; ".join(nearest.find_mismatches(traits))
    if name is not None:
        raise UnsupportedError(
            traits.source,
            f"is not a {name} model: {differs}",
            f"pass another family with --family: {', '.join(load_families(path))}; or --names"
            " source",
        )
    raise UnsupportedError(
        traits.source,
        f"matches no model family of reshard; the nearest is {nearest.name}, but {differs}",
        "keep the source's names with --names source",
    )


def get_families(name: str, path: Path | None = None) -> list[Family]:
    """Return the families of a name, or of a config's ``model_type``.

    Args:
        path: a user's file of rules.

    Raises:
        UsageError: no family has that name.
    """
    families = _find_families(name, path)
    if not families:
        raise UsageError(
            f"family {name!r}",
            f"is not a known model family: reshard has {', '.join(load_families(path))}",
            "pass a family whose parameters have the same names: --family NAME",
        )
    return families


# The other direction: from a config to traits


def read_config(
    config: Mapping[str, Any],
    source: str,
    name: str | None = None,
    defaults_of: Callable[[str], Mapping[str, Any]] = lambda _: {},
    path: Path | None = None,
) -> tuple[Family, Traits]:
    """Return the family of a transformers config, and the model's traits.

    Args:
        config: the config, with every default of its class filled in.
        name: name of the family from the user; None: the config's ``model_type``.
        defaults_of: function that returns the default config of a ``model_type``'s class.
        path: a user's file of rules.

    Raises:
        UsageError: no family has the name from the user.
        UnsupportedError: the config has settings that models of the family do not have.
    """
    model_type = str(config.get("model_type"))
    families = (
        get_families(name, path)
        if name is not None
        else _find_families(model_type, path) or _find_alike(model_type, path)
    )
    if not families:
        raise UnsupportedError(source, describe_unknown(model_type, path), _KEEP_NAMES)
    nearest: tuple[Family, list[str]] | None = None
    for family in families:
        flat = _flatten_config(config, family)
        traits, unsupported = _read_traits(family, flat, source)
        if model_type not in (family.model_type, *family.alike):
            unsupported.append(f"model_type is {model_type!r}")
        defaults = _flatten_config(defaults_of(family.model_type), family)
        unsupported += config_keys.find_changing_keys(flat, family.config, family.neutral, defaults)
        problems = [*unsupported, *family.find_mismatches(traits)]
        if not problems:
            return family, traits
        if nearest is None or len(problems) < len(nearest[1]):
            nearest = family, problems
    assert nearest is not None
    raise UnsupportedError(
        source,
        f"describes a model that differs from {nearest[0].name}, or may differ: "
        + "; ".join(nearest[1]),
        f"{_KEEP_NAMES}; if one of these keys does not change what the model computes, delete it"
        " in a copy of the config and pass the copy with --model",
    )


def describe_unknown(model_type: str, path: Path | None) -> str:
    """Return why models of a type that no family has are refused."""
    lacking = config_keys.load_settings().lacking.get(model_type)
    if lacking:
        return (
            f"describes a model of type {model_type}, and Megatron-core has no arguments for"
            f" {'; '.join(lacking)}"
        )
    return (
        f"describes a model of type {model_type}, for which reshard has no table; it has tables for"
        f" {', '.join(load_families(path))}"
    )


def _find_alike(model_type: str, path: Path | None) -> list[Family]:
    """Return the families that compute what models of another ``model_type`` do."""
    return [family for family in load_families(path).values() if model_type in family.alike]


def _read_traits(
    family: Family, config: Mapping[str, Any], source: str
) -> tuple[Traits, list[str]]:
    # What `when` requires holds unless the config states it; `find_mismatches` compares the two.
    traits = Traits(source=source, args=None).with_values(
        {
            name: required
            for name, required in family.when.items()
            if (name in OWN or not hasattr(Traits, name))
            and required != _ANY
            and not isinstance(required, list)
        }
    )
    unsupported, read = [], dict[str, Any]()
    for key, line in family.config.items():
        if (
            key not in _NAMING
            and fields.parse_field(line) is None
            and config.get(key, line) != line
        ):
            unsupported.append(f"{key} is {config[key]}, not {line}")
    for key, line, stated in fields.list_fields(family.config, config):
        try:
            value = line.read(stated, traits.get)
        except ValueError as error:
            unsupported.append(f"{key}: {error}")
            continue
        # Keys that state the same trait must agree.
        if read.setdefault(line.own, value) != value:
            unsupported.append(f"{key} is {stated}, not {read[line.own]}")
        else:
            traits = traits.with_values({line.own: value})
    for name, keys in megatron_traits.DROPOUTS.items():
        rates = (config.get(key) for key in keys)
        rate = next((rate for rate in rates if isinstance(rate, (int, float))), 0.0)
        traits = traits.with_values({name: float(rate)})
    hidden, heads = traits.hidden, traits.heads
    return (
        replace(
            traits,
            layers=traits.layers or len(traits.get("hybrid_pattern") or "") or None,
            groups=traits.groups or heads,
            head_dim=traits.head_dim or (hidden // heads if hidden and heads else None),
            # GPT-2's config has null for this width (``n_inner``) by default.
            ffn=traits.ffn or (4 * hidden if hidden else None),
        ),
        unsupported,
    )


def _flatten_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    # transformers 5 keeps rotary positions in ``rope_parameters``, and calls the number of experts
    # ``num_local_experts`` in every class.
    flat = dict(config)
    rope = flat.pop("rope_parameters", None)
    if isinstance(rope, Mapping) and set(rope) == set(_LAYER_ROPES):
        # Gemma 3's keys before transformers 5, which it still reads.
        of_window = rope["sliding_attention"]
        flat["rope_local_base_freq"] = of_window.get("rope_theta")
        if of_window.get("rope_type", "default") != "default":
            flat["local_rope_scaling"] = of_window
        rope = rope["full_attention"]
    if isinstance(rope, Mapping):
        rest = {key: value for key, value in rope.items() if key not in family.neutral}
        flat |= {key: rest.pop(key) for key in _ROPE if rest.get(key) is not None}
        flat["rope_scaling"] = None if rest == {"rope_type": "default"} else rest
    for names in _SYNONYMS:
        own = next((name for name in names if name in family.config), names[0])
        for name in names:
            if name in flat:
                flat.setdefault(own, flat[name])
                flat = {key: value for key, value in flat.items() if key != name or key == own}
    return flat
