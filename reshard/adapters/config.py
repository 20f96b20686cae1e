"""``adapter_config.json``: found beside the checkpoint, and held to the tensors it speaks of."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from reshard.adapters.names import (
    DEFAULT,
    IN,
    MAGNITUDE,
    OUT,
    SAVED_MODULE,
    TOKENS,
    Part,
    bare,
    part,
    rooted,
)
from reshard.box import Index
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError, shown
from reshard.formats.json_files import json_object
from reshard.schema import COUNT, NUMBER, TEXT, either, expect, fields, mapping, maybe, sequence
from reshard.units import counted, some

FILE = "adapter_config.json"
_NAMES = maybe(either(TEXT, sequence(TEXT)))
_KIND = fields(
    peft_type=TEXT,
    r=COUNT,
    lora_alpha=NUMBER,
    rank_pattern=maybe(mapping(TEXT, COUNT)),
    target_modules=_NAMES,
    target_parameters=_NAMES,
    modules_to_save=maybe(sequence(TEXT)),
    bias=maybe(TEXT),
)
_DEEPEST = 100  # components of a name
_SAID = 3  # contradictions
_PLAIN = re.compile(r"[\w.-]+")  # a pattern without regular expression; a file's are not run


@dataclass(frozen=True, slots=True)
class Config:
    """An adapter's configuration, and where it lies."""

    path: Path
    values: Mapping[str, Any]


def find(name: str, hf_dir: Path | None, near: Iterable[Path]) -> Config | None:
    """The configuration in ``hf_dir``, else beside the checkpoint; None where there is none.

    PEFT keeps that of an adapter with a name of its own in a folder of that name.

    Raises:
        UsageError: ``hf_dir`` was given and has none.
        UnsupportedError: it is not of LoRA.
        CorruptError: it is not JSON, or lacks what makes it a LoRA configuration.
    """
    places = [hf_dir] if hf_dir else list(near)
    folders = [place / name for place in places if name != DEFAULT] + places
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None and hf_dir:
        raise UsageError(hf_dir, f"has no {FILE}", "--adapter takes it from --hf-dir")
    return _read(path) if path else None


def _read(path: Path) -> Config:
    values = json_object(path)
    expect(path, values, _KIND)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(path, f"is of peft_type {kind!r}", "--adapter writes those of LORA")
    for key in ("r", "lora_alpha"):
        if not values.get(key):
            raise CorruptError(
                path,
                f"says {key} {values[key]}, which makes every adapter count for nothing"
                if key in values
                else f"has no {key!r}, and no tensor tells it",
                "correct a copy by what the run was started with, and name its directory with"
                " --hf-dir",
            )
    return Config(path, values)


def lacking(where: object, found: Sequence[Part], shapes: Mapping[str, Index]) -> IncompleteError:
    """That there is no configuration, with as much of one as the tensors tell."""
    ranks = _ranks(found, shapes)
    usual = Counter(ranks.values()).most_common(1)
    text: dict[str, Any] = {"peft_type": "LORA", "r": usual[0][0] if usual else None}
    others = {bare(layer): rank for layer, rank in ranks.items() if rank != text["r"]}
    if others:
        text["rank_pattern"] = others
    text["target_modules"] = sorted({bare(layer).rpartition(".")[2] for layer in ranks})
    if any(each.role == MAGNITUDE for each in found):
        text["use_dora"] = True
    modules = {each.layer.rpartition(".")[2] for each in found if each.role == SAVED_MODULE}
    if modules:
        text["modules_to_save"] = sorted(modules)
    known = json.dumps(text)[:-1]
    return IncompleteError(
        where,
        f"no {FILE} lies beside it, and no tensor tells its lora_alpha",
        "in the training script model.peft_config[NAME].save_pretrained(DIR) writes it; or write"
        f' DIR/{FILE} by hand: {known}, "lora_alpha": ...}} (use_rslora, bias and task_type too'
        " if the run set them); then add --hf-dir DIR",
    )


def check(config: Config, found: Sequence[Part], shapes: Mapping[str, Index]) -> None:
    """Hold a configuration to the tensors of its adapter.

    Args:
        shapes: of all weights, by fqn.

    Raises:
        IncompleteError: a layer has one of ``lora_A`` and ``lora_B`` without the other.
        CorruptError: the configuration is another adapter's.
    """
    _refuse_halves(config, found)
    wrong = chain(
        _wrong_ranks(config.values, _ranks(found, shapes)),
        _wrong_targets(config.values, found),
        _wrong_parts(config.values, found),
        _wrong_modules(config.values, found, shapes),
    )
    problems = list(islice(wrong, _SAID))
    if problems:
        raise CorruptError(
            config.path,
            f"is not of these tensors: {'; '.join(problems)}",
            "name the directory of the adapter's own with --hf-dir",
        )


def _ranks(found: Iterable[Part], shapes: Mapping[str, Index]) -> dict[str, int]:
    """Layer -> its rank, as ``lora_A`` has it."""
    return {
        each.layer: shapes[each.fqn][0] for each in found if each.role in IN and shapes[each.fqn]
    }


def _refuse_halves(config: Config, found: Sequence[Part]) -> None:
    halves = [{each.layer for each in found if each.role in roles} for roles in (IN, OUT)]
    alone = sorted(halves[0] ^ halves[1])
    if alone:
        raise IncompleteError(
            config.path.parent,
            f"{counted(len(alone), 'adapted layer')} ({some(alone)}) with lora_A or lora_B alone",
            "a shard is missing, or --include or --exclude left one out",
        )


def _wrong_ranks(values: Mapping[str, Any], ranks: Mapping[str, int]) -> Iterator[str]:
    if values.get("target_parameters"):
        return  # their ranks are of all experts together
    patterns = values.get("rank_pattern") or {}
    plain = all(map(_PLAIN.fullmatch, patterns))
    for layer, rank in ranks.items():
        own = [patterns[name] for name in _endings(layer) if name in patterns]
        said = (own or [values["r"]]) if plain else [values["r"], *patterns.values()]
        if rank not in said:
            yield f"it says r {said[0]}, and {layer} has {rank}"


def _wrong_targets(values: Mapping[str, Any], found: Sequence[Part]) -> Iterator[str]:
    targets, others = values.get("target_modules"), values.get("target_parameters") or ()
    if isinstance(targets, str) or isinstance(others, str):
        return  # a regular expression, or all-linear
    named = {*(targets or ()), *(each.rpartition(".")[0] for each in others)}
    layers = dict.fromkeys(each.layer for each in found if each.role in IN)
    for layer in layers:
        if named.isdisjoint(_endings(layer)):
            yield f"its target_modules do not name {layer}"


def _wrong_parts(values: Mapping[str, Any], found: Sequence[Part]) -> Iterator[str]:
    """What an option adds to a layer is there exactly if the option is set."""
    has = {
        "use_dora": any(each.role == MAGNITUDE for each in found),
        "lora_bias": any(each.role in OUT and each.fqn.endswith(".bias") for each in found),
        "trainable_token_indices": any(each.role == TOKENS for each in found),
    }
    for option, there in has.items():
        if there != bool(values.get(option)):
            tensors = "tensors of it are there" if there else "no tensor of it is there"
            yield f"it says {option} {shown(values.get(option))}, and {tensors}"


def _wrong_modules(
    values: Mapping[str, Any], found: Sequence[Part], shapes: Mapping[str, Index]
) -> Iterator[str]:
    named = set(values.get("modules_to_save") or ())
    sizes = set(map(len, named))
    for layer in dict.fromkeys(each.layer for each in found if each.role == SAVED_MODULE):
        if not any(layer[-size:] in named for size in sizes):  # as PEFT: whatever it ends in
            yield f"its modules_to_save do not name {layer}"
    if not any(each.adapter for each in found):
        return  # PEFT's own file, in which a saved module has its own name
    for fqn in shapes:
        if part(fqn) is None and not named.isdisjoint(_endings(rooted(fqn).rpartition(".")[0])):
            yield f"its modules_to_save name {fqn}, which has no trained copy"


def _endings(layer: str) -> list[str]:
    """What PEFT takes as a layer's name where it is no pattern: its last components, of any number.

    >>> _endings("base_model.model.layers.0.q_proj")
    ['layers.0.q_proj', '0.q_proj', 'q_proj']
    """
    path = bare(layer).split(".")
    return [".".join(path[at:]) for at in range(max(0, len(path) - _DEEPEST), len(path))]
