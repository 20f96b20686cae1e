"""Which layers and weights an adapter must have, by its configuration and its base model.

The rules are those by which PEFT creates an adapter. Source: PEFT 0.21 ``tuners/tuners_utils.py``
(check_target_module_exists, _maybe_include_all_linear_layers, _inject_parameters),
``utils/other.py`` (_set_trainable) and ``utils/save_and_load.py`` (get_peft_model_state_dict).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.model.adapter_names import (
    EMBEDDINGS,
    MAGNITUDE,
    OUT,
    SAVED_MODULE,
    TOKENS,
    TRAINED,
    AdapterPart,
    add_root,
    find_parts,
    parse_part,
)
from reshard.tensors.adapters.base_names import group_by_module, is_targeted, strip_peft
from reshard.training.companion_files import is_embedding
from reshard.units import abridge

ALL_LINEAR = "all-linear"
TOKEN_ADAPTER = ".token_adapter"  # noqa: S105 - a module of PEFT
# Characters of a regular expression that is safe to run: no group is repeated, and few characters.
_SAFE = re.compile(
    r"(?:\\[.dwb]|\[[\w^-]+\]|\(\?(?::|!|=|<!|<=)|\[\\d\]|[\w.|()^$-])(?:[*+?]\??|\{1,\})?"
)
_MOST_REPEATS = 5
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_LAST_LAYER = re.compile(r".*\.[^.]*\.(\d+)\.")  # as before PEFT 0.20
_HEADS = {"classifier", "score"}  # PEFT adds both names for classification (peft_model.py)
_CLASSIFIES = ("SEQ_CLS", "TOKEN_CLS")


def compile_safe(pattern: str) -> re.Pattern[str] | None:
    r"""Compile a regular expression of a file; None if its search could take exponential time.

    >>> compile_safe(r".*layers\.(0|1)\..*q_proj") is not None, compile_safe("(a+)+") is None
    (True, True)
    """
    repeats = sum(pattern.count(mark) for mark in "*+{")
    safe = "".join(match[0] for match in _SAFE.finditer(pattern)) == pattern
    if not safe or repeats > _MOST_REPEATS or re.search(r"\)[*+?{]", pattern):
        return None
    try:
        return re.compile(pattern)
    except re.error:
        return None


@dataclass(slots=True)
class AdapterContent:
    """What an adapter has, under the names of the model that is adapted.

    Args:
        layers: adapted layer -> number of its sets of tensors; several if it has parameters that
            are adapted one by one.
        roles: adapted layer -> the roles of its tensors; ``bias`` of ``lora_B`` is one.
        tokens: embeddings of which the adapter has rows.
        weights: weights and buffers that the adapter has as a whole; None if only the part of them
            in ``modules_to_save`` is known.
    """

    layers: Counter[str] = field(default_factory=Counter)
    roles: dict[str, set[str]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    weights: set[str] | None = None


def list_content(parts: Iterable[AdapterPart], others: Iterable[str] | None) -> AdapterContent:
    """Return what the tensors of an adapter are.

    Args:
        others: the names of the tensors in PEFT's file that are no parts; None for another source.
    """
    content = AdapterContent()
    seen = set()
    for part in parts:
        layer = strip_peft(add_root(part.layer))
        if part.role in TRAINED and part.layer:
            content.layers[layer] += part.layer not in seen
            seen.add(part.layer)
            is_bias = part.role in OUT and part.saved_as.endswith(".bias")
            content.roles.setdefault(layer, set()).add("bias" if is_bias else part.role)
        elif part.role == TOKENS:
            content.tokens.add(layer.removesuffix(TOKEN_ADAPTER))
        elif part.role == SAVED_MODULE:
            content.saved.add(strip_peft(part.saved_as))
    if others is not None:
        content.weights = {strip_peft(add_root(fqn)) for fqn in others}
        content.saved |= content.weights
    return content


def list_base_names(fqns: Iterable[str]) -> set[str]:
    """Return the names in the base model of the weights that an adapted model stores.

    >>> list_base_names(["base_model.model.head.original_module.weight"])
    {'head.weight'}
    """
    wrapped = (strip_peft(add_root(fqn)) for fqn in fqns)
    return {name.replace(".original_module.", ".").replace(TOKEN_ADAPTER, "") for name in wrapped}


def read_content(fqns: Iterable[str]) -> AdapterContent:
    """Return what the tensors of PEFT's file are, by their names."""
    fqns = list(fqns)
    return list_content(find_parts(fqns), [fqn for fqn in fqns if parse_part(fqn) is None])


class Targets:
    """The layers that a configuration names.

    Args:
        values: the content of ``adapter_config.json``.
        linear: the linear layers that ``all-linear`` means; None: not known.
    """

    def __init__(self, values: Mapping[str, Any], linear: Collection[str] | None = None) -> None:
        self._linear = linear
        self._targets, self._excluded = values.get("target_modules"), values.get("exclude_modules")
        self._saved = values.get("modules_to_save") or ()
        self.parameters: Sequence[str] = values.get("target_parameters") or ()
        chosen = values.get("layers_to_transform")
        self._numbers = [chosen] if isinstance(chosen, int) else chosen or ()
        patterns = values.get("layers_pattern") or ()
        self._patterns = [patterns] if isinstance(patterns, str) else patterns

    @property
    def is_all_linear(self) -> bool:
        """Whether the layers depend on classes of modules, which names do not show."""
        return isinstance(self._targets, str) and self._targets.lower() == ALL_LINEAR

    def decide(self, module: str) -> bool | None:
        """Return whether PEFT adapts a module; None if the names and the rules do not show it."""
        if any(f".{name}." in f".{module}." for name in self._saved):
            return None  # PEFT 0.21 leaves them out
        is_excluded = _matches(self._excluded, module) if self._excluded else False
        if is_excluded is not False:
            return None if is_excluded is None else False
        if self._targets is None:
            return False if self.parameters else None
        if self.is_all_linear:
            return None if self._linear is None else module in self._linear
        found = _matches(self._targets, module)
        if not found or isinstance(self._targets, str) or module in self._targets:
            return found
        return self._is_chosen_layer(module) if self._numbers else True

    def _is_chosen_layer(self, module: str) -> bool | None:
        if any(re.fullmatch(r"\w+", pattern) is None for pattern in self._patterns):
            return None
        by_name = [re.compile(rf"(?:^|.*?\.){pattern}\.(\d+)\.") for pattern in self._patterns]
        versions = [by_name] if by_name else [[_LAYER], [_LAST_LAYER]]
        answers = set()
        for patterns in versions:
            match = next((match for pattern in patterns if (match := pattern.match(module))), None)
            answers.add(match is not None and int(match[1]) in self._numbers)
        return answers.pop() if len(answers) == 1 else None


def _matches(named: str | Sequence[str], module: str) -> bool | None:
    """Return whether a regular expression or a list names a module; None if it is not run."""
    if isinstance(named, str):
        pattern = compile_safe(named)
        return None if pattern is None else pattern.fullmatch(module) is not None
    return any(f".{module}".endswith(f".{name}") for name in named)


def find_missing(
    content: AdapterContent,
    values: Mapping[str, Any],
    names: Collection[str],
    linear: Collection[str] | None = None,
) -> Iterator[str]:
    """Yield what an adapter lacks of the layers and weights that its configuration names.

    Args:
        names: the weights and buffers of the base model.
        linear: its linear layers.
    """
    targets, modules = Targets(values, linear), group_by_module(names)
    adapted = content.layers.keys() | content.tokens
    has_other_head = values.get("task_type") in _CLASSIFIES
    lost = [
        module
        for module, own in modules.items()
        if f"{module}.weight" in own and module not in adapted and targets.decide(module)
        if not (has_other_head and module.rpartition(".")[2] in EMBEDDINGS)
    ]
    if lost:
        yield f"tensors of {abridge(sorted(lost))}, which target_modules name"
    # Neither option restricts parameters in every version.
    if not values.get("layers_to_transform") and not values.get("exclude_modules"):
        for module, own in modules.items():
            named = [fqn for fqn in own if is_targeted(fqn, targets.parameters)]
            if content.layers[module] < len(named):
                yield f"tensors of {abridge(sorted(named))}, which target_parameters name"
                break
    for name, weights in _find_unsaved(content, values, names).items():
        yield f"{abridge(weights)}, as modules_to_save name {name}"
    biases = {fqn for fqn in names if fqn.endswith(".bias")}
    if values.get("bias") != "all":  # lora_only; not every version of PEFT saves those of the base
        biases &= {f"{layer}.bias" for layer in content.layers}
        biases = set() if biases.isdisjoint(content.saved) else biases
    if biases - content.saved and content.weights is not None and values.get("bias") != "none":
        yield f"{abridge(sorted(biases - content.saved))}, as bias is {values.get('bias')!r}"
    yield from _find_missing_roles(content, values)


def _find_unsaved(
    content: AdapterContent, values: Mapping[str, Any], names: Collection[str]
) -> dict[str, list[str]]:
    listed: Sequence[str] = values.get("modules_to_save") or ()
    unsaved: dict[str, list[str]] = {}
    found = set()
    for fqn in {*names, *content.saved}:
        path = fqn.split(".")
        for name in listed:
            if any(".".join(path[:at]).endswith(name) for at in range(1, len(path))):
                found.add(name)
                if fqn not in content.saved:
                    unsaved.setdefault(name, []).append(fqn)
    heads = [name for name in listed if name in _HEADS]
    if heads and values.get("task_type") in _CLASSIFIES and found.isdisjoint(heads):
        unsaved[heads[0]] = [f"{heads[0]}.weight"]
    return {name: sorted(weights) for name, weights in unsaved.items()}


def _find_missing_roles(content: AdapterContent, values: Mapping[str, Any]) -> Iterator[str]:
    for option, role in (("use_dora", MAGNITUDE), ("lora_bias", "bias")):
        lost = [layer for layer, roles in content.roles.items() if role not in roles]
        if values.get(option) and lost and len(lost) < len(content.roles):
            yield f"the {role} of {abridge(sorted(lost))}, as {option} is set"
    indices = values.get("trainable_token_indices")
    for name in indices if isinstance(indices, Mapping) and len(indices) > 1 else ():
        is_tied = name.rpartition(".")[2] in EMBEDDINGS  # then the rows are saved once
        if not is_tied and not any(_matches([name], layer) for layer in content.tokens):
            yield f"the rows of {name}, as trainable_token_indices name it"


def find_unexpected(
    content: AdapterContent,
    values: Mapping[str, Any],
    names: Collection[str] = (),
    linear: Collection[str] | None = None,
) -> Iterator[str]:
    """Yield what an adapter has, and PEFT would not create for its configuration.

    Args:
        names, linear: as for `find_missing`.
    """
    targets = Targets(values, linear)
    is_tying = bool(values.get("ensure_weight_tying"))
    stray = [
        layer
        for layer in content.layers
        if targets.decide(layer) is False
        and not (is_tying and layer.rpartition(".")[2] in EMBEDDINGS)
        and not _has_parameters(layer, targets.parameters, names)
    ]
    if stray:
        options = ("target_modules", "layers_to_transform", "exclude_modules")
        given = " with ".join(option for option in options if values.get(option))
        yield f"{given or options[0]} do not name {abridge(sorted(stray))}"
    saved: Sequence[str] = values.get("modules_to_save") or ()
    bias = values.get("bias") or "none"
    whole = [
        fqn
        for fqn in content.weights or ()
        if not _is_inside(fqn, saved)
        and not (bias != "none" and fqn.endswith(".bias"))
        # `save_pretrained` adds the embeddings if their size may have changed.
        and not (is_embedding(fqn) or fqn.rpartition(".")[0].rpartition(".")[2] in EMBEDDINGS)
    ]
    if whole:
        yield f"modules_to_save and bias do not name {abridge(sorted(whole))}"


def _is_inside(fqn: str, modules: Sequence[str]) -> bool:
    path = fqn.split(".")
    return any(".".join(path[:at]).endswith(tuple(modules)) for at in range(1, len(path)))


def _has_parameters(layer: str, targets: Sequence[str], names: Collection[str]) -> bool:
    if names:
        return any(is_targeted(fqn, targets) for fqn in names if fqn.rpartition(".")[0] == layer)
    owners = [target.rpartition(".")[0] for target in targets]
    return any(not owner or f".{layer}".endswith(f".{owner}") for owner in owners)
