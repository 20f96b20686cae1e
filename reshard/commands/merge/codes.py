"""Passes of a merge for quantised models: their weights, and a config.json that describes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reshard.commands.merge.passes import Merge
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import Entry, Quantisation
from reshard.errors import UsageError
from reshard.formats import coded_values
from reshard.model import adapter_names as adapters
from reshard.quantised.pairs import METHODS, find_evidence
from reshard.quantised.statement import CONFIG, OTHERS, read_statement, remove_statement
from reshard.training.companion_files import QUANTISED
from reshard.units import abridge


def dequantise(merge: Merge) -> Merge:
    """Return the merge with dequantised weights if the user wants them in another form."""
    options = merge.options
    if options.dtype in (None, "keep") and not options.writes_codes:
        return merge
    manifest, notes = coded_values.dequantise(merge.manifest)
    merge.notes.derived += notes
    return replace(merge, manifest=manifest)


def match_config(merge: Merge) -> Merge:
    """Return the merge with a config that describes its weights, and note what changes.

    A config that states how codes are to be dequantised must be beside the codes, and only there:
    transformers reads codes as plain numbers, or asks for scales, if it is wrong.
    """
    stated = merge.manifest.quantisation
    if stated is not None and not stated.decoded:
        _check_config_of_codes(merge, stated)
    else:
        merge = _drop_statement(merge)
    merge.notes.warnings += _note_rounded(merge)
    _refuse_rounded_scales(merge)
    merge.notes.warnings += _note_codes(merge)
    return merge


def _find_unstated(merge: Merge) -> Entry | None:
    """Return a part of a quantised weight, such as QLoRA's base, if no file states the method."""
    how = (merge.companions.config or {}).get(QUANTISED)
    is_stated = merge.manifest.quantisation is not None or how
    return None if is_stated or merge.adapter else find_evidence(merge.manifest)


def _note_codes(merge: Merge) -> Iterator[str]:
    entry = _find_unstated(merge)
    if entry is not None:
        yield (
            f"{entry.fqn!r} ({entry.dtype}) is part of a quantised weight: codes are written as"
            " stored, and no config.json states how to read them; --merge-lora BASE adds an"
            " adapter to the base that was not quantised"
        )


def _check_config_of_codes(merge: Merge, stated: Quantisation) -> None:
    config, advice = merge.companions.config, ""
    if stated.method in METHODS:
        advice = f"; --dtype {stated.dtype} dequantises them"
    if not merge.is_directory:
        merge.notes.warnings.append(
            f"the weights are codes and scales of {stated.method}, as stored, and this file does"
            f" not state how to read them{advice}"
        )
    elif config is not None and Path(stated.stated_in).name == CONFIG:
        found = read_statement(config, "")
        if found is None or found.settings != stated.settings:
            raise UsageError(
                str(merge.companions.directory),
                f"its config.json does not state the quantisation of {stated.stated_in}"
                f" ({stated.method}), so the codes cannot be interpreted",
                f"pass the quantised model's directory as --hf-dir{advice}",
            )


def _drop_statement(merge: Merge) -> Merge:
    companions = merge.companions
    found = read_statement(companions.config or {}, "")
    if companions.config is None or found is None or not _has_plain_weights(merge):
        return merge
    if not merge.options.writes_codes:
        merge.notes.derived.append(
            f"config.json: quantization_config ({found.method}) left out: no weight is quantised"
        )
    others = tuple(path for path in companions.others if path.name not in OTHERS)
    config = remove_statement(companions.config)
    return replace(merge, companions=replace(companions, config=config, others=others))


def _has_plain_weights(merge: Merge) -> bool:
    """Return whether all weights are floats of a model; an adapter's base can be quantised."""
    tensors = merge.weights.tensors
    is_float = all(dtype.family == "float" for entry, dtype in tensors if entry.shape)
    return is_float and not adapters.find_parts(entry.fqn for entry, _ in tensors)


def _note_rounded(merge: Merge) -> Iterator[str]:
    # Such weights are few, and were left in fp32 for a reason: DeepSeek V3's correction bias
    # chooses experts by differences that bf16 cannot represent.
    stated = merge.manifest.quantisation
    rounded = [
        entry.fqn
        for entry, dtype in merge.weights.tensors
        if entry.dtype == FLOAT32 and dtype.itemsize < FLOAT32.itemsize
    ]
    if stated is not None and stated.decoded and rounded:
        yield f"stored in fp32 and rounded: {abridge(rounded)}; --keep-fp32 REGEX keeps them"


def _refuse_rounded_scales(merge: Merge) -> None:
    dtype, how = merge.options.dtype, (merge.companions.config or {}).get(QUANTISED)
    is_cast = any(entry.dtype != written for entry, written in merge.weights.tensors)
    if dtype and is_cast and (how or _find_unstated(merge)):
        method = how.get("quant_method") if isinstance(how, dict) else None
        stated = (method or "no method given") if how else ""
        coded_values.refuse_rounded_scales(merge.manifest, dtype, stated)
