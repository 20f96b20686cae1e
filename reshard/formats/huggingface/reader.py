"""Read a model's weights: one file, shards under an index, or shards without their index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from reshard.containers import safetensors
from reshard.containers.pickles import trust
from reshard.core.location import Location
from reshard.core.manifest import (
    PARAM,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    index_entries,
)
from reshard.errors import (
    DAMAGED,
    MIXED,
    CorruptError,
    IncompleteError,
    StaleError,
    UnrecognisedError,
    UnsafeError,
)
from reshard.formats.adjacent_files import describe_recipe
from reshard.formats.huggingface.directory import (
    NAME,
    find_index,
    is_index,
    is_whole_set,
    list_other_weights,
    suggest_parts,
)
from reshard.formats.huggingface.slices import (
    describe_slices,
    find_slices,
    join_slices,
    load_rules,
)
from reshard.quantised.scale_names import find_precision
from reshard.quantised.statement import find_statement
from reshard.system.files import read_small_file
from reshard.system.threads import map_files
from reshard.units import abridge

OTHERS = "also contains other weights, which were not read: {}"


def read(location: Location, rules: Path | None = None) -> Manifest:
    """Read a directory through its index, a directory of one file, or one file.

    Args:
        rules: a file with the cuts of tensors, of which files of ranks have slices.

    Raises:
        UnsafeError: the index names a file outside its directory.
        IncompleteError: a shard, or a tensor that the index lists, is missing.
        CorruptError: shards and index contradict each other.
        UnrecognisedError: there are several files and no index.
    """
    manifest = replace(_read(location, rules), quantisation=find_statement(location.files))
    notes = [] if location.chosen else describe_recipe(location)
    manifest = replace(manifest, warnings=(*manifest.warnings, *notes))
    others = list_other_weights(location, {Path(path).name for path in manifest.files})
    if others and not location.chosen:
        text = OTHERS.format(abridge(others))
        manifest = replace(manifest, warnings=(*manifest.warnings, text))
    return manifest


def _read(location: Location, rules: Path | None) -> Manifest:
    if location.chosen and not is_index(location.chosen):
        return _read_chosen(location.path, rules)
    # transformers, too, prefers it to any .bin index. Others (``value_head.safetensors`` of
    # LLaMA-Factory, ``vit.safetensors`` of ms-swift) may be beside either.
    usual = ("model.safetensors", "adapter_model.safetensors")
    known = next((name for name in usual if name in location.files), None)
    if known and not location.chosen:
        return _read_file(location.files[known])
    index = location.chosen or find_index(location)
    if index is not None:
        return _read_indexed(location, location.files[index])
    found = [path for path in location.files.values() if path.suffix == ".safetensors"]
    if is_whole_set(location):
        return _read_unindexed(location.path, sorted(found))
    if rules and len(found) > 1 and len(find_slices(found[0], found)) == len(found):
        return _read_chosen(found[0], rules)
    if len(found) != 1:
        raise UnrecognisedError(
            location,
            f"contains {len(found)} safetensors files but no index that states how they belong"
            f" together: {', '.join(file.name for file in found[:4])}",
            "fetch model.safetensors.index.json, or pass one file if it is a complete model",
        )
    return _read_file(found[0])


def _read_unindexed(directory: Path, shards: Sequence[Path]) -> Manifest:
    """Read all shards of a save whose index is missing; each states its own tensors."""
    read = map_files(shards, _read_shard)
    entries = [entry for tensors, _, _ in read for entry in tensors]
    manifest = _build_manifest(
        directory, entries, {source.path: source for _, source, _ in read}, set()
    )
    text = (
        f"there is no model.safetensors.index.json: {len(shards)} shards belong together by their"
        " names"
    )
    return replace(manifest, warnings=(*manifest.warnings, text))


def _read_chosen(path: Path, rules: Path | None) -> Manifest:
    """Read one file, and those of the other tensor-parallel ranks if rules state the cuts."""
    manifest = _read_file(path)
    if path.suffix != safetensors.SUFFIX:
        return manifest
    slices = find_slices(path, path.parent.glob(f"*{safetensors.SUFFIX}"))
    if not slices:
        return manifest
    table = load_rules(rules, (entry.fqn for entry in manifest.entries.values()))
    if table is None:
        return replace(manifest, warnings=(*manifest.warnings, describe_slices(path, slices)))
    ranks = map_files([slices[number] for number in sorted(slices)], _read_file)
    return join_slices(slices, ranks, table)


def _read_file(path: Path) -> Manifest:
    entries, source, globals_ = _read_shard(path)
    return _build_manifest(path, entries, {source.path: source}, globals_)


def _read_indexed(location: Location, index: Path) -> Manifest:
    try:
        weight_map = json.loads(read_small_file(index))["weight_map"]
        names = sorted(set(weight_map.values()))
        safe = all(_is_plain_name(name) for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            index, f"is not an index: it has no weight_map of names of files ({error})", DAMAGED
        ) from error
    if not safe:
        bad = next(name for name in names if not _is_plain_name(name))
        raise UnsafeError(
            index,
            f"names the file {bad!r}, which is outside the directory",
            "the index was tampered with: do not use this checkpoint",
        )
    entries: list[Entry] = []
    sources: dict[str, SourceFile] = {}
    globals_: set[str] = set()
    promised: dict[str, set[str]] = {name: set() for name in names}
    for fqn, name in weight_map.items():
        promised[name].add(fqn)
    missing = next((name for name in names if name not in location.files), None)
    if missing:
        advice = f"fetch that file{suggest_parts(index.parent)}"
        raise IncompleteError(index, f"names {missing}, which is missing", advice)
    shards = [location.files[name] for name in names]
    for name, shard, read in zip(names, shards, map_files(shards, _read_shard), strict=True):
        tensors, source, seen = read
        _check_shard(index, shard, {entry.fqn for entry in tensors}, promised[name])
        entries += tensors
        sources[source.path] = source
        globals_ |= seen
    order = {fqn: position for position, fqn in enumerate(weight_map)}
    entries.sort(key=lambda entry: order[entry.fqn])
    return _build_manifest(index.parent, entries, sources, globals_)


def _is_plain_name(name: str) -> bool:
    return bool(name) and PurePosixPath(name).name == name and name not in (".", "..")


def _check_shard(index: Path, shard: Path, stored: set[str], promised: set[str]) -> None:
    if promised - stored:
        fqn = min(promised - stored)
        raise IncompleteError(
            index, f"lists {fqn!r} in {shard.name}, which does not contain it", MIXED
        )
    if stored - promised:
        fqn = min(stored - promised)
        raise StaleError(
            shard,
            f"contains {fqn!r}, but {index.name} does not list it there: the index or the shard is"
            " outdated",
        )


def _read_shard(path: Path) -> tuple[list[Entry], SourceFile, set[str]]:
    if not safetensors.is_safetensors_file(path):
        return _read_torch_shard(path)
    shard = safetensors.read(path)
    entries = [
        Entry(name, PARAM, chunk.dtype, chunk.box.shape, (chunk,))
        for name, chunk in shard.tensors.items()
    ]
    return entries, shard.source, set()


def _read_torch_shard(path: Path) -> tuple[list[Entry], SourceFile, set[str]]:
    from reshard.containers import torch_reader
    from reshard.state_dict import sections, tree

    file = torch_reader.read(path)
    state = sections.find(tree.convert_file(file), str(path)).model
    entries = [
        tensor.make_entry(name, PARAM)
        for name, leaf in state.items()
        if (tensor := tree.as_global(leaf))
    ]
    return entries, file.source(), file.globals


def _build_manifest(
    path: Path, entries: list[Entry], sources: dict[str, SourceFile], globals_: set[str]
) -> Manifest:
    return Manifest(
        origin=Origin(
            format=NAME if path.is_dir() else "safetensors",
            path=str(path),
            detail=f"{len(sources)} file{'s' if len(sources) != 1 else ''}",
            mesh={"world": 1},
            precision=find_precision(entries),
            weights_only=True,
        ),
        entries=index_entries(entries),
        files=sources,
        trained_dtypes={entry.fqn: entry.dtype for entry in entries},
        unknown_globals=trust.list_unknown(globals_),
        ordered=False,  # files and index are sorted by name, or by dtype and name
    )
