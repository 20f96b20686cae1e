"""Find the settings that change a model and that a family does not implement.

Weights under another framework's names compute the same only if every setting that changes the
model is known on the other side. A family's table lists the keys of a transformers config and the
arguments of Megatron that it implements (``config``, ``args``), and the neutral values of others
(``neutral``); ``tables/settings.yaml`` lists what holds for every family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from reshard.core.schema import either, make_kind, mapping, record, sequence
from reshard.layouts.model_parallel.rules import load_document
from reshard.units import shorten

ANY = "any"  # no value of the key changes what the family computes
EACH = "each"  # one of these, or a list of them
NEUTRAL = mapping(  # the structure of a section with neutral values
    item=either(
        sequence(), record(each=sequence()), make_kind(f"the word {ANY}", lambda v: v == ANY)
    )
)
_EXPERTS = "moe_"
_OF_CLASSIFIERS = {"id2label", "label2id", "num_labels", "problem_type"}  # no Megatron model is one
_SHOWN = 60  # letters of a value in a message


@dataclass(frozen=True)
class Settings:
    """The settings of every family.

    Args:
        irrelevant: keys of a config that never change what a model computes.
        neutral: key of a config -> the values at which it changes nothing.
        args: argument of Megatron -> the values at which it changes nothing.
        meanings: argument -> what another value means, for messages.
        lacking: ``model_type`` -> what Megatron has no arguments for.
    """

    irrelevant: frozenset[str]
    neutral: Mapping[str, Any]
    args: Mapping[str, Any]
    meanings: Mapping[str, str]
    lacking: Mapping[str, list[str]]


@cache
def load_settings() -> Settings:
    """Return the settings of ``tables/settings.yaml``."""
    root = load_document("settings")
    config, args = root["config"], root["args"]
    return Settings(
        frozenset(key for line in config["irrelevant"] for key in line.split()),
        config["neutral"],
        {name: line["neutral"] for name, line in args.items()},
        {name: line["means"] for name, line in args.items()},
        root["lacking"],
    )


def find_changing_args(
    args: Mapping[str, Any], implemented: Mapping[str, Any], neutral: Mapping[str, Any]
) -> Iterator[str]:
    """Yield each of Megatron's arguments that changes what the model computes, with its value.

    Args:
        implemented: the arguments that the family implements.
        neutral: the family's own neutral values, by argument.
    """
    settings = load_settings()
    has_experts = bool(args.get("num_experts"))
    for name, allowed in {**settings.args, **neutral}.items():
        value = args.get(name)
        if name in implemented or value is None or (name.startswith(_EXPERTS) and not has_experts):
            continue
        if not _is_neutral(value, allowed):
            stated = f"{name} {shorten(repr(value), _SHOWN)}"
            # A user's family may list arguments that no built-in table describes.
            meaning = settings.meanings.get(name)
            yield f"{meaning} ({stated})" if meaning else stated


def get_default_arg(name: str) -> Any:
    """Return the value of an argument that a run does not state: the first neutral one."""
    allowed = load_settings().args.get(name)
    return allowed[0] if isinstance(allowed, list) and allowed else None


def find_changing_keys(
    config: Mapping[str, Any],
    implemented: Mapping[str, Any],
    neutral: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> Iterator[str]:
    """Yield each key that may change what the model computes, with its value.

    Args:
        implemented: the keys that the family implements.
        neutral: the family's own neutral values, by key.
        defaults: the defaults of the family's class in transformers, which the family implements.
    """
    missing = object()  # None is a value that a default may have
    settings = load_settings()
    allowed = {**settings.neutral, **neutral}
    for key, value in config.items():
        if key in implemented or key in settings.irrelevant or key.startswith("_") or value is None:
            continue
        if defaults.get(key, missing) != value and not _is_neutral(value, allowed.get(key, [])):
            yield f"{key} is {value!r}"


def find_first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first key by which two configs may describe different models; empty if none does.

    Keys that one of them lacks are not compared: versions of transformers write different ones.

    >>> find_first_difference({"a": {"b": 1}, "use_cache": True}, {"a": {"b": 2}, "c": 3})
    'a.b is 1 and 2'
    """
    irrelevant = load_settings().irrelevant - _OF_CLASSIFIERS
    for key in sorted(one.keys() & other.keys()):
        before, after = one[key], other[key]
        if key in irrelevant or key.startswith("_") or before == after:
            continue
        if key == "architectures" and None in (before, after):
            continue  # a config that was saved without its model
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            return f"{key} is {shorten(before, _SHOWN)} and {shorten(after, _SHOWN)}"
        if inner := find_first_difference(before, after):
            return f"{key}.{inner}"
        if before.keys() != after.keys() and not (before.keys() & after.keys()):
            return f"{key} is {shorten(dict(before), _SHOWN)} and {shorten(dict(after), _SHOWN)}"
    return ""


def _is_neutral(value: Any, allowed: Any) -> bool:
    if allowed == ANY:
        return True
    if isinstance(allowed, Mapping):
        values = value if isinstance(value, list) else [value]
        return all(item in allowed[EACH] for item in values)
    return value in allowed
