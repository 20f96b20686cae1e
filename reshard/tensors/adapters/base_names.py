"""The weights of a base model, under the names that an adapter has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reshard.core import keys
from reshard.core.manifest import Manifest
from reshard.errors import UsageError
from reshard.model.adapter_names import ROOT
from reshard.units import abridge

_BASE_LAYER = ".base_layer"


def strip_peft(fqn: str) -> str:
    """Return the name of a layer or weight in the model that is adapted.

    >>> strip_peft("base_model.model.mlp.experts.base_layer")
    'mlp.experts'
    >>> strip_peft("base_model.model.lm_head.base_layer.weight")
    'lm_head.weight'
    """
    return f"{fqn.removeprefix(ROOT)}.".replace(f"{_BASE_LAYER}.", ".").removesuffix(".")


def match_names(base: Manifest, layers: Iterable[str]) -> tuple[Manifest, str]:
    """Return the base under names that fit those of the adapted layers, and a prefix for these.

    Hugging Face's files may lack the first part of the live model's names (``transformer.`` of
    GPT-2's); the weights then get it. An adapter of a model without a head lacks the first part of
    the names of the whole model (``model.``); the prefix adds it.

    Args:
        layers: names of the adapted layers, without what PEFT adds to them.

    Raises:
        UsageError: the base has none of the layers.
    """
    wanted = sorted(set(layers))
    names = {entry.fqn for entry in base.entries.values()}
    modules = _list_modules(names)
    if not wanted or any(layer in modules for layer in wanted):
        return base, ""
    for prefix in _list_first_parts(wanted):
        if any(layer.removeprefix(prefix) in modules for layer in wanted):
            new = {fqn: fqn if fqn.startswith("lm_head.") else prefix + fqn for fqn in names}
            return keys.select(base, new), ""
    for prefix in _list_first_parts(names):
        if any(prefix + layer in modules for layer in wanted):
            return base, prefix
    raise UsageError(
        base.origin.path,
        f"does not have the adapted layers {abridge(wanted)}; it has {abridge(sorted(names))}",
        "pass the base model that the adapter was trained on, saved with the names of the live"
        " model",
    )


def list_missing(base: Manifest, layers: Iterable[str]) -> list[str]:
    """Return the adapted layers that a base does not have under any of these names."""
    wanted = list(layers)
    try:
        base, prefix = match_names(base, wanted)
    except UsageError:
        return wanted
    modules = _list_modules(entry.fqn for entry in base.entries.values())
    return [layer for layer in wanted if prefix + layer not in modules]


def list_params(names: Iterable[str], module: str, targets: Sequence[str]) -> list[str]:
    """Return the weights of a module that an adapter may change.

    Args:
        names: the names of all weights.
        module: the module's name.
        targets: the setting ``target_parameters``.
    """
    own = [fqn for fqn in names if fqn.rpartition(".")[0] == module]
    targeted = [fqn for fqn in own if is_targeted(fqn, targets)]
    return targeted or [fqn for fqn in own if fqn == f"{module}.weight"]


def is_targeted(fqn: str, targets: Sequence[str]) -> bool:
    """Return whether ``target_parameters`` name a weight: by its name, or by the end of it."""
    return any(f".{fqn}".endswith(f".{target}") for target in targets)


def group_by_module(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return module -> the names of its own weights."""
    groups: dict[str, list[str]] = {}
    for fqn in names:
        groups.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    return groups


def _list_modules(names: Iterable[str]) -> set[str]:
    return set(group_by_module(names))


def _list_first_parts(names: Iterable[str]) -> list[str]:
    return sorted({f"{name.partition('.')[0]}." for name in names if "." in name})
