"""``merge --adapter``: write a PEFT adapter as PeftModel.from_pretrained loads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.commands.merge.passes import Adapter, Merge
from reshard.containers import safetensors_shards as writer
from reshard.containers.json_files import format_json
from reshard.core import keys
from reshard.core.location import leads_outside, note_outside
from reshard.core.manifest import Entry, Manifest, OutputFile, Skeleton
from reshard.errors import IncompleteError, ReshardError, UnsupportedError, UsageError
from reshard.model import adapter_names as names
from reshard.model.adapter_names import AdapterPart
from reshard.system.files import SourceFiles, read_small_file
from reshard.tensors.adapters import config as configs
from reshard.tensors.lazy import is_zero
from reshard.training import companion_files as companions
from reshard.units import abridge, counted

FILE = "adapter_model.safetensors"
_FILES = (FILE, "adapter_model.bin")


def lay_out(merge: Merge) -> Merge:
    """Return the merge with PEFT's single weights file, which PEFT never shards, and its config."""
    if merge.adapter is None:  # `select_adapter` is the pass before
        raise AssertionError(merge.path)
    tensors = merge.weights.tensors
    merge.notes.warnings += merge.adapter.notes
    merge.notes.warnings += _note_untrained([entry for entry, _ in tensors])
    weights = writer.lay_out_file(FILE, tensors, writer.METADATA)
    texts = (OutputFile.from_bytes(name, data) for name, data in merge.adapter.texts.items())
    return replace(merge, skeleton=Skeleton((*weights.files, *texts), weights.entries))


def _note_untrained(entries: Sequence[Entry]) -> list[str]:
    start = [entry for entry in entries if _find_role(entry.fqn) in names.START_AT_ZERO]
    with SourceFiles() as pool:
        zero = [entry.fqn for entry in start if is_zero(pool, entry)]
    if not zero:
        return []
    effect = "the adapter has no effect" if len(zero) == len(start) else "they have no effect"
    count = f"{len(zero)} of {len(start)} lora_B"
    return [f"{count} are all zero ({abridge(zero)}), as before training: {effect}"]


def _find_role(fqn: str) -> str:
    part = names.parse_part(fqn)
    return part.role if part else ""


def select_adapter(merge: Merge) -> Merge:
    """Return the merge with an adapter's tensors only, under the names that PEFT's file has.

    They are checked against the adapter's configuration.

    Raises:
        UsageError: there is no adapter of that name, or no configuration in ``--hf-dir``.
        UnsupportedError: unknown tensors that look like those of an adapter.
        IncompleteError: there is no configuration, a layer lacks one of its tensors, or the source
            lacks weights of the adapter that its optimizer has.
        CorruptError: the configuration is that of another adapter.
    """
    manifest, near = merge.manifest, merge.list_config_places()
    where = manifest.origin.path
    shapes = manifest.weight_shapes
    tied = {
        alias: kept for alias, kept in manifest.tied.items() if _find_role(alias) != names.TOKENS
    }
    _refuse_unsaved(manifest, shapes)
    shapes |= {alias: shapes[kept] for alias, kept in tied.items() if kept in shapes}
    parts = names.find_parts(shapes)
    present = {part.adapter for part in parts}
    only = present.pop() if len(present) == 1 else ""
    name = merge.options.adapter or only or names.DEFAULT
    unknown = names.find_unknown(shapes)
    if unknown:
        raise UnsupportedError(
            where,
            f"{abridge(unknown)}: not known parts of a PEFT adapter",
            configs.SAVE_WITH_PEFT,
        )
    # First, because it may name a method that is not known, of which the tensors show nothing.
    stated = merge.source.names.describe_adapter(manifest)
    config = configs.find(name, merge.options.hf_dir, near, is_stated=stated is not None)
    in_names = _find_name_in_tensors(where, name, parts, shapes)
    own = [part for part in parts if part.adapter == in_names]
    if config is not None:
        stated = None
    elif stated is not None:
        stated["target_modules"] = _list_targets(own, merge.companions.config or {})
        folder = merge.options.hf_dir or near[0]
        config = configs.AdapterConfig(folder / configs.FILE, stated)
    if config is None:
        raise configs.build_missing_error(where, own, shapes)
    configs.check(config, own, shapes)
    saved = names.choose_saved(shapes, parts, in_names, config.values)
    others = len(shapes) - len(saved)
    left = f"; {counted(others, 'other tensor')} left out" if others else ""
    roots = [merge.options.hf_dir] if merge.options.hf_dir else near
    root = next(root for root in roots if config.path.is_relative_to(root))
    files = (*companions.list_model_files(config.path.parent, {}), config.path)
    files = files if stated is None else files[:-1]
    outside = [path for path in files if leads_outside(path, root)]
    merge.notes.warnings += note_outside(outside)
    source = (
        f"with {config.path}" if stated is None else f"with {configs.FILE} as the run states it"
    )
    merge.notes.derived.append(f"adapter {name}: {counted(len(saved), 'tensor')}, {source}{left}")
    texts = {path.name: read_small_file(path) for path in files if path not in outside}
    adapter = Adapter(
        name,
        config,
        texts if stated is None else {**texts, configs.FILE: format_json(stated)},
        [*_note_trained_base(manifest, saved, parts), *_note_empty_files(manifest, near)],
    )
    return replace(merge, manifest=keys.select(manifest, saved), adapter=adapter, tied="keep")


def _list_targets(parts: Sequence[AdapterPart], config: Mapping[str, Any]) -> list[str]:
    """Return the last names of the adapted layers, or whole names if not all have adapters."""
    layers = {names.strip_root(part.layer) for part in parts}
    counts = Counter(layer.rpartition(".")[2] for layer in layers)
    are_all = set(counts.values()) == {config.get("num_hidden_layers")}
    return sorted(counts if are_all else layers)


def _refuse_unsaved(manifest: Manifest, fqns: Collection[str]) -> None:
    unsaved = names.find_unsaved(manifest.train.group_of, fqns)
    if unsaved:
        raise IncompleteError(
            manifest.origin.path,
            f"has optimizer state of {counted(len(unsaved), 'adapter weight')} ({abridge(unsaved)})"
            ", but no weights of these names",
            names.SAVE_UNSAVED,
        )


def _find_name_in_tensors(
    where: str, name: str, parts: Sequence[AdapterPart], fqns: Iterable[str]
) -> str:
    """Return the adapter's name in the names of its tensors; empty if PEFT itself saved them."""
    present = list(dict.fromkeys(part.adapter for part in parts))
    if not present:
        if any(names.is_adapted(fqn) for fqn in fqns):
            raise UnsupportedError(
                where,
                f"contains no adapter of {', '.join(names.METHODS)}",
                configs.SAVE_WITH_PEFT,
            )
        raise UsageError(where, "contains no PEFT adapter", "leave out --adapter and --merge-lora")
    if present == [""]:
        return ""
    if name not in present:
        raise UsageError(
            f"--adapter {name}",
            f"{where} has {counted(len(present), 'adapter')}: {', '.join(filter(None, present))}",
            f"pass --adapter {present[0]}" if len(present) == 1 else "pass one of these names",
        )
    return name


def _note_trained_base(
    manifest: Manifest, saved: Mapping[str, str], parts: Sequence[AdapterPart]
) -> list[str]:
    apart = {*saved, *manifest.frozen, *(part.fqn for part in parts)}
    groups = manifest.train.param_groups
    left = [fqn for group in groups for fqn in group.fqns if fqn not in apart]
    count = counted(len(left), "trained weight")
    text = (
        f"{count} of the base model ({abridge(left)}) left out, because PEFT does not save them"
        " with this adapter: a merge without --adapter writes them"
    )
    return [text] if left else []


def _note_empty_files(manifest: Manifest, near: Sequence[Path]) -> list[str]:
    """PEFT writes such files under ZeRO 3 if the weights were not gathered."""
    paths = [folder / name for folder in near for name in _FILES]
    notes = []
    for path in dict.fromkeys(path for path in paths if path.is_file()):
        if str(path) in manifest.files:
            continue
        try:
            entries = formats.read_outputs(path.parent, [path.name])
        except ReshardError as error:
            notes.append(f"{path} was not read: {error.problem}")
            continue
        empty = sum(1 for entry in entries.values() if not entry.numel)
        if empty == len(entries):
            notes.append(
                f"{path} contains no values ({counted(empty, 'tensor')} of size 0): the output"
                f" comes from the shards in {manifest.origin.path}"
            )
    return notes
