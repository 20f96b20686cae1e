"""``merge --merge-lora``: add a LoRA adapter to its base model."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from reshard.commands.merge import adapter, passes
from reshard.commands.merge.filling import read_model
from reshard.commands.merge.options import MERGE_LORA, MergeOptions
from reshard.commands.merge.passes import Addition, Merge
from reshard.core.box import contiguous_cuts
from reshard.core.location import get_directory
from reshard.core.manifest import PARAM, Entry, Manifest
from reshard.errors import CorruptError, DifferentError, UnsupportedError, UsageError, shown
from reshard.formats import placeholders, registry
from reshard.model import library
from reshard.model.adapter_names import ADALORA, LORA, TOKENS, TRAINED_TOKENS, add_root, find_parts
from reshard.model.build import list_modules
from reshard.naming import published
from reshard.naming.published import ModelConfig
from reshard.quantised.packed import find_packed
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.tensors import weights
from reshard.tensors.adapters import base_names, merging, targets
from reshard.tensors.adapters.base_names import strip_peft
from reshard.tensors.adapters.config import OWN_CONFIG, AdapterConfig, refuse_missing
from reshard.tensors.adapters.merging import Merged
from reshard.tensors.adapters.product import Product
from reshard.tensors.lazy import find_first_difference, is_zero, read_block
from reshard.tensors.weights import Weights, find_head_name
from reshard.training import companion_files
from reshard.training.companion_files import Companions, is_embedding
from reshard.units import abridge

_COMPARED = 8  # weights of the run that are compared with the base
_COMPARED_ELEMENTS = 1 << 14  # of each compared weight
_MERGED = (LORA, ADALORA, TRAINED_TOKENS)
_HEAD = "lm_head.weight"
_HEAD_ROWS = f"lm_head.{TOKENS}"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def add_adapter(merge: Merge) -> Merge:
    """Return the merge of the base model with the source's adapter added.

    Raises:
        UsageError: the base is another model, or the source has no such adapter.
        UnsupportedError: reshard does not know how to merge a part of the adapter.
        DifferentError: the run was trained on another base, the adapter changes nothing, or it
            would change only one of two tied weights.
        ReshardError: the base or the adapter cannot be read.
    """
    options, run = merge.options, merge.manifest
    path = as_path(str(options.merge_lora))
    companions = companion_files.find_companions(None, [get_directory(path)])
    config = companions.config or {}
    selected = adapter.select_adapter(merge)
    if selected.adapter is None:
        raise AssertionError(path)
    config_of_adapter = selected.adapter.config
    if config_of_adapter.method not in _MERGED:
        raise UnsupportedError(
            config_of_adapter.path,
            f"has peft_type {config_of_adapter.method!r}, but {MERGE_LORA} supports only"
            f" {', '.join(_MERGED)}",
            f"write the adapter with --adapter {selected.adapter.name}, and add it to the base with"
            " PeftModel.from_pretrained and merge_and_unload",
        )
    chosen = _read_adapter(selected)
    entries = [entry for entry, _ in chosen.tensors]
    base, notes = _open_base(path, options)
    merge.notes.derived += notes
    if is_tied(config):
        entries = _leave_out_rows_of_head(entries, base)
    base = _choose_form(base, companions, merging.list_layers(entries))
    merged = merging.merge_adapter(base, entries, selected.adapter.config, is_tied=is_tied(config))
    warnings = merge.notes.warnings
    warnings += _check_content(entries, merged, selected.adapter.config, companions)
    warnings += selected.adapter.notes
    warnings += _note_other_base(path, selected.adapter.config.values, config)
    with SourceFiles() as pool:
        _check_same_base(run, merged, pool)
        warnings += _check_effect(merged, pool)
        is_untied = _check_ties(merged, pool, options.tied)
    return replace(
        merge,
        source=registry.describe_source(base),
        manifest=replace(merged.manifest, files={**run.files, **merged.manifest.files}),
        companions=companions,
        tied="keep" if is_untied else options.tied,
        addition=_describe_addition(selected.adapter.name, path, merged, chosen),
    )


def _check_content(
    entries: Sequence[Entry], merged: Merged, config: AdapterConfig, companions: Companions
) -> list[str]:
    # The files of the base can have other names than its live model, and layers that the model does
    # not have (for the prediction of several tokens). So what differs is compared with the model.
    content = targets.read_content(entry.fqn for entry in entries)
    chosen = targets.Targets(config.values)
    names = [entry.fqn for entry in merged.base.entries.values()]
    if is_tied(companions.config or {}):
        heads = (find_head_name(fqn) for fqn in names if is_embedding(fqn))
        names += [head for head in heads if head and head not in names]
    sides: list[tuple[list[str], frozenset[str] | None]] = [(names, None)]
    missing, wrong = list[str](), list[str]()
    for of_model, linear in sides:
        own = {fqn.removeprefix(merged.prefix) for fqn in of_model if fqn.startswith(merged.prefix)}
        missing = list(targets.find_missing(content, config.values, own, linear))
        wrong = list(targets.find_unexpected(content, config.values, own, linear))
        is_open = bool(missing or wrong) or chosen.is_all_linear
        if is_open and linear is None and companions.config and library.is_installed():
            with contextlib.suppress(UsageError):  # a model that transformers does not have
                sides.append(list_modules(str(companions.directory)))
    if wrong:
        raise CorruptError(
            config.path, f"does not fit these tensors: {'; '.join(wrong)}", OWN_CONFIG
        )
    refuse_missing(config, missing)
    layers = {fqn.rpartition(".")[0].removeprefix(merged.prefix) for fqn in names}
    if len(sides) > 1 or not any(
        chosen.decide(layer) is None for layer in content.layers.keys() & layers
    ):
        return []
    stated = shown(config.values.get("target_modules"))
    note = f"{config.path} does not show which layers are adapted (target_modules is {stated})"
    return [f"{note}: reshard cannot tell whether one is missing"]


def _choose_form(base: Manifest, companions: Companions, layers: Sequence[str]) -> Manifest:
    # Its files may have the experts one by one, other prefixes, or another name of the head. A base
    # that uses its embedding as the head has no head under any names.
    config, missing = companions.config, base_names.list_missing(base, layers)
    if config is None or not missing or not library.may_be_converted(config):
        return base
    try:
        form = published.choose_form(base, ModelConfig(config, companions.directory), "module")
    except (UsageError, UnsupportedError):
        return base  # `merge_adapter` names the layers that it lacks
    is_better = len(base_names.list_missing(form.manifest, layers)) < len(missing)
    return form.manifest if is_better else base


def _read_adapter(selected: Merge) -> Weights:
    manifest = selected.manifest
    placeholders.refuse(manifest, manifest.entries.values())
    chosen = weights.select(manifest, "keep")
    return passes.compare_copies(replace(selected, weights=chosen)).weights


def _leave_out_rows_of_head(entries: list[Entry], base: Manifest) -> list[Entry]:
    # TRAINABLE_TOKENS saves the rows of the embedding under both names. Rows with other values
    # stay, and `merge_adapter` refuses them.
    if any(entry.fqn.endswith(_HEAD) for entry in base.entries.values()):
        return entries
    rows = [entry for entry in entries if entry.fqn.endswith(f".{TOKENS}")]
    heads = [entry for entry in rows if entry.fqn.endswith(f".{_HEAD_ROWS}")]
    others = [entry for entry in rows if entry not in heads]
    if len(heads) != 1 or len(others) != 1:
        return entries
    with SourceFiles() as pool:
        differs = find_first_difference(pool, heads[0], others[0]) is not None
    return entries if differs else [entry for entry in entries if entry is not heads[0]]


def _open_base(path: Path, options: MergeOptions) -> tuple[Manifest, list[str]]:
    base, notes = read_model(path, MERGE_LORA, options.allow_pickle)
    if find_parts(entry.fqn for entry in base.entries.values()):
        raise UsageError(
            f"{MERGE_LORA} {path}",
            "contains an adapter; the base model has none",
            "pass the adapter as SOURCE, and the directory of its base model here",
        )
    return base, notes


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether a model that stores no head uses its embedding as the head.

    transformers before 5 leaves ``tie_word_embeddings`` out of config.json where it is true.
    """
    declared = config.get("tie_word_embeddings")
    if declared is None:
        classes = config.get("architectures") or ()
        return any(str(name).endswith(_WITH_HEAD) for name in classes)
    return bool(declared)


def _check_same_base(run: Manifest, merged: Merged, pool: SourceFiles) -> None:
    """Codes of quantised weights (QLoRA) are left out: bitsandbytes may store them as any dtype."""
    trained = run.train.group_of
    entries = {entry.fqn: entry for entry in run.of_kind(PARAM)}
    packed = find_packed(run)
    stored = {
        merged.prefix + strip_peft(add_root(entry.fqn)): entry
        for entry in entries.values()
        if entry.fqn not in trained and entry.fqn not in packed and entry.numel
        if entry.dtype.family == "float" and f"{entry.fqn}.quant_map" not in entries
    }
    bases = {entry.fqn: entry for entry in merged.base.of_kind(PARAM)}
    both = [fqn for fqn in stored if fqn in bases and fqn not in merged.replaced]
    for fqn in both[:: max(len(both) // _COMPARED, 1)]:
        if not _is_alike(stored[fqn], bases[fqn], pool):
            before, after = bases[fqn].shape, stored[fqn].shape
            differs = f"the values of {fqn!r} differ from those of"
            if before != after:
                differs = f"{fqn!r} has the shape {before}, but {after} in"
            raise DifferentError(
                f"{MERGE_LORA} {merged.base.origin.path}",
                f"{differs} the adapter's run ({stored[fqn].chunks[0].file})",
                "pass the base model that the adapter was trained on",
            )


def _is_alike(one: Entry, other: Entry, pool: SourceFiles) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype and not one.dtype.family == other.dtype.family == "float":
        return True  # a quantised copy: not comparable
    box = next(contiguous_cuts(one.shape, _COMPARED_ELEMENTS))
    return any(
        read_block(pool, one, box, dtype) == read_block(pool, other, box, dtype)
        for dtype in dict.fromkeys((one.dtype, other.dtype))
    )


def _check_effect(merged: Merged, pool: SourceFiles) -> list[str]:
    zero = [fqn for fqn, product in merged.products.items() if _is_zero(product, pool)]
    if len(zero) == len(merged.products) and not any(_find_changed(merged, pool)):
        raise DifferentError(
            "the adapter",
            "changes nothing: one matrix of every LoRA layer is zero, as before the first training"
            " step",
            "pass a checkpoint that was saved after a training step",
        )
    if not zero:
        return []
    count = f"{len(zero)} of {len(merged.products)} LoRA products"
    return [f"{count} are zero ({abridge(zero)}), as before training: these weights are the base's"]


def _is_zero(product: Product, pool: SourceFiles) -> bool:
    factors = product.b, product.a, product.singular
    return any(is_zero(pool, entry) for entry in factors if entry is not None)


def _find_changed(merged: Merged, pool: SourceFiles) -> Iterator[str]:
    before = {entry.fqn: entry for entry in merged.base.entries.values()}
    after = {entry.fqn: entry for entry in merged.manifest.entries.values()}
    for fqn in (*merged.replaced, *merged.token_rows):
        old = before.get(fqn)
        if old is None or find_first_difference(pool, old, after[fqn]) is not None:
            yield fqn


def _check_ties(merged: Merged, pool: SourceFiles, policy: weights.Tied) -> bool:
    entries = {entry.fqn: entry for entry in merged.manifest.entries.values()}
    differing = [
        (head, embedding)
        for head, embedding in merged.untied.items()
        if find_first_difference(pool, entries[head], entries[embedding]) is not None
    ]
    for head, embedding in differing:
        if policy != "keep" and not merged.products.keys().isdisjoint((head, embedding)):
            raise DifferentError(
                head,
                f"is tied to {embedding!r}, and the adapter adds a LoRA product to only one of"
                " them; PEFT's own merge would change both",
                "pass --tied keep to write two separate weights, as in training, and"
                " tie_word_embeddings false",
            )
    return bool(differing)


def _describe_addition(name: str, path: Path, merged: Merged, chosen: Weights) -> Addition:
    products = merged.products.values()
    scales = Counter(product.scale for product in products)
    return Addition(
        adapter=name,
        base=str(path),
        revision=_find_revision(path),
        scales={f"{scale:.6g}": count for scale, count in sorted(scales.items())},
        dora=sum(1 for product in products if product.magnitude is not None),
        from_masters=chosen.from_master,
        replaced=merged.replaced,
        added=merged.added,
        token_rows=merged.token_rows,
        worker_nbytes=max((product.nbytes for product in products), default=0),
    )


def _find_revision(path: Path) -> str:
    # Source: huggingface_hub 1.0, ``file_download.py``: a cache has ``snapshots/COMMIT``, a
    # ``local_dir`` has ``.cache/huggingface/download/FILE.metadata`` with the commit in line 1.
    directory = get_directory(path)
    for folder in (directory, directory.resolve()):
        if folder.parent.name == "snapshots":
            return folder.name
    metadata = directory / ".cache/huggingface/download/config.json.metadata"
    lines = metadata.read_text(errors="replace").splitlines() if metadata.is_file() else []
    return lines[0] if lines and _COMMIT.fullmatch(lines[0]) else ""


def _note_other_base(
    path: Path, values: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    stated = values.get("base_model_name_or_path")
    if not isinstance(stated, str) or not stated:
        return
    names = {PurePath(text).name for text in (path.resolve(), config.get("_name_or_path")) if text}
    names |= {part.rpartition("--")[2] for part in path.resolve().parts if "--" in part}
    if PurePath(stated).name not in names:
        yield (
            f"the adapter's configuration names the base model {stated!r}, which {path} does not"
            " seem to be: reshard compares names and shapes, and values only if the run stores"
            " weights of the base"
        )
