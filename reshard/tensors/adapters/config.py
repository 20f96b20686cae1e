"""Reading of ``adapter_config.json``, and its comparison with the tensors of the adapter."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from reshard.containers.json_files import read_json_object
from reshard.core.box import Index
from reshard.core.schema import (
    COUNT,
    NUMBER,
    TEXT,
    either,
    expect,
    fields,
    mapping,
    maybe,
    sequence,
)
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError, shown
from reshard.model.adapter_names import (
    ADALORA,
    DEFAULT,
    EMBEDDINGS,
    IN,
    LORA,
    MAGNITUDE,
    MERGE_LORALIB,
    METHODS,
    NOT_OF_PEFT,
    OUT,
    PROMPTS,
    SAVED_MODULE,
    TOKENS,
    TRAINED_TOKENS,
    VERL,
    AdapterPart,
    find_methods,
    is_of_loralib,
    parse_part,
    strip_root,
)
from reshard.tensors.adapters import targets
from reshard.units import abridge, counted

FILE = "adapter_config.json"
_FOLDERS = (VERL, "model", "weights/model")
_NAMES = maybe(either(TEXT, sequence(TEXT)))
_TYPE = fields(peft_type=TEXT)
_KIND = fields(
    target_modules=_NAMES,
    target_parameters=_NAMES,
    modules_to_save=maybe(sequence(TEXT)),
    bias=maybe(TEXT),
)
_LORA_KIND = fields(r=COUNT, lora_alpha=NUMBER, rank_pattern=maybe(mapping(TEXT, COUNT)))
_ADALORA_KIND = fields(init_r=COUNT, lora_alpha=NUMBER)
_DEEPEST = 100  # maximum components of a name
_MOST_PROBLEMS = 3  # contradictions in one message
OWN_CONFIG = "pass the directory of the adapter's own configuration as --hf-dir"
SAVE_WITH_PEFT = (
    "write all weights to one file (reshard merge SOURCE all.safetensors), load it into the model"
    " with its adapters (model.load_state_dict(..., strict=False)), and call model.save_pretrained"
)
_PLAIN = re.compile(r"[\w.-]+")  # a plain name; regular expressions of a file are not run


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's configuration, and its path."""

    path: Path
    values: Mapping[str, Any]

    @property
    def method(self) -> str:
        """PEFT's name of the method, a key of `METHODS`."""
        return str(self.values["peft_type"])


def find(
    name: str, hf_dir: Path | None, near: Iterable[Path], *, is_stated: bool = False
) -> AdapterConfig | None:
    """Read the configuration in ``hf_dir``, else beside the checkpoint; None if there is none.

    PEFT stores the configuration of an adapter with a name of its own in a folder of that name;
    verl writes a copy of the adapter, with the configuration, into ``lora_adapter``. NeMo
    Automodel and NeMo RL save it into a folder beside the optimizer's.

    Args:
        is_stated: whether the checkpoint states the configuration.

    Raises:
        UsageError: ``hf_dir`` was given, and nothing has a configuration.
        UnsupportedError: reshard does not know how PEFT saves adapters of this method.
        CorruptError: the file is not JSON, or lacks a required value.
    """
    directories = [hf_dir] if hf_dir else list(near)
    folders = [directory / name for directory in directories if name != DEFAULT] + directories
    folders += [directory / folder for directory in directories for folder in _FOLDERS]
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None and hf_dir and not is_stated:
        raise UsageError(hf_dir, f"has no {FILE}", "pass the directory that has it as --hf-dir")
    return _read(path) if path else None


def _read(path: Path) -> AdapterConfig:
    values = read_json_object(path)
    expect(path, values, _TYPE)
    kind = values.get("peft_type")
    if kind not in METHODS:
        raise UnsupportedError(
            path,
            f"has peft_type {kind!r}; --adapter supports {', '.join(METHODS)}",
            SAVE_WITH_PEFT,
        )
    expect(path, values, _KIND)
    if kind == TRAINED_TOKENS:  # PEFT 0.21 ``tuners/trainable_tokens/config.py``
        values = {**values, "trainable_token_indices": values.get("token_indices")}
    if kind not in (LORA, ADALORA):
        return AdapterConfig(path, values)
    expect(path, values, _LORA_KIND if kind == LORA else _ADALORA_KIND)
    for key in ("r", "lora_alpha") if kind == LORA else ("init_r",):
        if not values.get(key):
            raise CorruptError(
                path,
                f"has {key} {values[key]}, which disables every adapter"
                if key in values
                else f"has no {key!r}, and the tensors do not reveal it",
                "copy the file, set the value that the run used, and pass the directory as"
                " --hf-dir",
            )
    return AdapterConfig(path, values)


def build_missing_error(
    where: object, parts: Sequence[AdapterPart], shapes: Mapping[str, Index]
) -> IncompleteError | UnsupportedError:
    """Return the error for a missing configuration, with the values that the tensors reveal."""
    save = "write it in the training script: model.peft_config[NAME].save_pretrained(DIR)"
    if is_of_loralib(parts):
        return UnsupportedError(where, f"its LoRA tensors {NOT_OF_PEFT}", MERGE_LORALIB)
    if find_methods(parts) != [LORA]:
        return IncompleteError(where, f"there is no {FILE} beside it", f"{save}; add --hf-dir DIR")
    ranks = _read_ranks(parts, shapes)
    usual = Counter(ranks.values()).most_common(1)
    text: dict[str, Any] = {"peft_type": LORA, "r": usual[0][0] if usual else None}
    others = {strip_root(layer): rank for layer, rank in ranks.items() if rank != text["r"]}
    if others:
        text["rank_pattern"] = others
    text["target_modules"] = sorted({strip_root(layer).rpartition(".")[2] for layer in ranks})
    if any(part.role == MAGNITUDE for part in parts):
        text["use_dora"] = True
    modules = {part.layer.rpartition(".")[2] for part in parts if part.role == SAVED_MODULE}
    if modules:
        text["modules_to_save"] = sorted(modules)
    known = json.dumps(text)[:-1]
    return IncompleteError(
        where,
        f"there is no {FILE} beside it, and the tensors do not reveal lora_alpha",
        f"{save}; or create"
        f' DIR/{FILE} by hand: {known}, "lora_alpha": ...}} (use_rslora, bias and task_type too'
        " if the run set them); then add --hf-dir DIR",
    )


def check(config: AdapterConfig, parts: Sequence[AdapterPart], shapes: Mapping[str, Index]) -> None:
    """Compare a configuration with the tensors of its adapter.

    Args:
        shapes: shapes of all weights, by fqn.

    Raises:
        IncompleteError: a layer has only some of the tensors that belong together, or the source
            has the base model too, and the adapter lacks layers or weights of the configuration.
        CorruptError: the configuration belongs to another adapter.
        UnsupportedError: the adapter has prompts and whole modules.
    """
    _refuse_incomplete(config, parts)
    if config.method == ADALORA and any(part.adapter for part in parts):
        raise UnsupportedError(
            config.path,
            "is that of AdaLoRA, whose file has only the ranks that PEFT chose among those of the"
            " trained model",
            SAVE_WITH_PEFT,
        )
    others = [fqn for fqn in shapes if parse_part(fqn) is None]
    is_run = any(part.adapter for part in parts)  # in PEFT's file a saved module has its own name
    content = targets.list_content(parts, None if is_run else others)
    names = targets.list_base_names(others) if is_run else set[str]()
    wrong = chain(
        _find_wrong_method(config.method, parts),
        _find_wrong_ranks(config, parts, shapes),
        _find_missing_targets(config, parts),
        targets.find_unexpected(content, config.values, names),
        _find_wrong_parts(config.values, parts),
        _find_wrong_modules(config.values, parts),
    )
    problems = list(islice(wrong, _MOST_PROBLEMS))
    if problems:
        raise CorruptError(
            config.path,
            f"does not fit these tensors: {'; '.join(problems)}",
            OWN_CONFIG,
        )
    refuse_missing(config, targets.find_missing(content, config.values, names))
    if {PROMPTS, SAVED_MODULE} <= {part.role for part in parts}:  # saved without the usual prefix
        raise UnsupportedError(config.path, "has prompts and modules_to_save", SAVE_WITH_PEFT)


def refuse_missing(config: AdapterConfig, missing: Iterable[str]) -> None:
    """Raise an error if an adapter lacks what its configuration names.

    Raises:
        IncompleteError: it lacks something.
    """
    problems = list(islice(missing, _MOST_PROBLEMS))
    if problems:
        raise IncompleteError(
            config.path,
            f"names more than the adapter has: there are no {'; no '.join(problems)}",
            f"fetch the file or shard that has them; if this adapter never had them, {OWN_CONFIG}",
        )


def _read_ranks(parts: Iterable[AdapterPart], shapes: Mapping[str, Index]) -> dict[str, int]:
    return {
        part.layer: shapes[part.fqn][0] for part in parts if part.role in IN and shapes[part.fqn]
    }


def _refuse_incomplete(config: AdapterConfig, parts: Sequence[AdapterPart]) -> None:
    for group in METHODS[config.method]:
        found = {(part.layer, part.role) for part in parts if part.role in group}
        counts = Counter(layer for layer, _ in found)
        partial = sorted(layer for layer, count in counts.items() if count < len(group))
        if partial:
            raise IncompleteError(
                config.path.parent,
                f"{counted(len(partial), 'adapted layer')} ({abridge(partial)}) without"
                f" {' or '.join(group)}",
                "fetch the missing shard, or change --include or --exclude if they left the tensor"
                " out",
            )


def _find_wrong_method(method: str, parts: Sequence[AdapterPart]) -> Iterator[str]:
    fitting = find_methods(parts)
    if method not in fitting:
        others = " or ".join(fitting) or "several methods"
        yield f"peft_type is {method!r}, but the tensors are those of {others}"


def _find_wrong_ranks(
    config: AdapterConfig, parts: Sequence[AdapterPart], shapes: Mapping[str, Index]
) -> Iterator[str]:
    values = config.values
    if config.method != LORA or values.get("target_parameters"):
        return  # a rank of target_parameters covers all experts together
    ranks = _read_ranks(parts, shapes)
    patterns = values.get("rank_pattern") or {}
    plain = all(map(_PLAIN.fullmatch, patterns))
    for layer, rank in ranks.items():
        own = [patterns[name] for name in _list_endings(layer) if name in patterns]
        declared = (own or [values["r"]]) if plain else [values["r"], *patterns.values()]
        if rank not in declared:
            yield f"r is {declared[0]}, but {layer} has rank {rank}"


def _find_missing_targets(config: AdapterConfig, parts: Sequence[AdapterPart]) -> Iterator[str]:
    """PEFT refuses targets of which the model has none."""
    roles = set(chain.from_iterable(METHODS[config.method]))
    if not roles or any(part.role in roles for part in parts):
        return
    for option in ("target_modules", "target_parameters"):
        targets = config.values.get(option)
        if targets:
            yield f"{option} are {shown(targets)}, but there is no {abridge(sorted(roles))}"


def _leave_out_tied(values: Mapping[str, Any], layers: Iterable[str]) -> list[str]:
    """With ``ensure_weight_tying`` PEFT adapts or saves the layers that are tied to those, too."""
    names = dict.fromkeys(layers)
    if not values.get("ensure_weight_tying"):
        return [*names]
    return [layer for layer in names if layer.rpartition(".")[2] not in EMBEDDINGS]


def _find_wrong_parts(values: Mapping[str, Any], parts: Sequence[AdapterPart]) -> Iterator[str]:
    has = {
        "use_dora": any(part.role == MAGNITUDE for part in parts),
        "lora_bias": any(part.role in OUT and part.fqn.endswith(".bias") for part in parts),
        "trainable_token_indices": any(part.role == TOKENS for part in parts),
    }
    for option, present in has.items():
        if present != bool(values.get(option)):
            tensors = "its tensors are present" if present else "its tensors are missing"
            yield f"{option} is {shown(values.get(option))}, but {tensors}"


def _find_wrong_modules(values: Mapping[str, Any], parts: Sequence[AdapterPart]) -> Iterator[str]:
    named = set(values.get("modules_to_save") or ())
    sizes = set(map(len, named))
    layers = _leave_out_tied(values, (part.layer for part in parts if part.role == SAVED_MODULE))
    for layer in layers:
        if not any(layer[-size:] in named for size in sizes):  # PEFT compares the end of the name
            yield f"modules_to_save do not name {layer}"


def _list_endings(layer: str) -> list[str]:
    """Return the names by which PEFT may refer to a layer: its last components, of any number.

    >>> _list_endings("base_model.model.layers.0.q_proj")
    ['layers.0.q_proj', '0.q_proj', 'q_proj']
    """
    path = strip_root(layer).split(".")
    return [".".join(path[at:]) for at in range(max(0, len(path) - _DEEPEST), len(path))]
