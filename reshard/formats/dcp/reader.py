"""Read a DCP directory as one tree: the state dict before it was flattened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from reshard.core import counts
from reshard.core.chunks import Chunk
from reshard.core.location import Location, list_missing_ranks
from reshard.core.manifest import SourceFile
from reshard.errors import FETCH_MISSING, CorruptError, IncompleteError
from reshard.formats.dcp import metadata
from reshard.formats.dcp.directory import METADATA
from reshard.formats.dcp.flattened import restore
from reshard.formats.dcp.items import ItemReader
from reshard.formats.dcp.metadata import Metadata
from reshard.quantised import moments
from reshard.state_dict import tree
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import ParsedTree
from reshard.system.files import SourceFiles, get_size

_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_MODELS, _OPTIMIZERS = ("model", "state_dict"), ("optim", "optimizer")  # usual first parts of keys
_OPTIMIZER_KEY = re.compile(rf"({'|'.join(_OPTIMIZERS)})\.(?=(?:state|param_groups)\.)")
_LISTED = 4
_DATA = re.compile(r"__(\d+)_(\d+)\.distcp")


def read(location: Location) -> ParsedTree:
    """Read the tree of one directory.

    Raises:
        IncompleteError: ``.metadata`` or a data file is missing.
        CorruptError: files contradict each other.
        UnsafeError: the metadata name a file outside the directory.
    """
    about, parsed = _read_stored(location)
    return replace(parsed, root=_nest(location, about, parsed.root))


def read_flat(location: Location) -> ParsedTree:
    """Read each tensor and object under its own key, for a caller that knows the keys."""
    _, parsed = _read_stored(location)
    return parsed


def _read_stored(location: Location) -> tuple[Metadata, ParsedTree]:
    about = metadata.read(find_metadata_files(location))
    objects = {key: block for key, block in about.objects.items() if block is not None}
    used = {block.file for stored in about.tensors.values() for block in stored.blocks}
    used |= {block.file for block in objects.values()}
    paths = {name: location.files.get(name) or location.find_nested(name) for name in used}
    with SourceFiles() as pool:
        items = ItemReader(pool)
        leaves: dict[str, Any] = {}
        places = [
            (path, block, stored.dtype)
            for stored in about.tensors.values()
            for block in stored.blocks
            if (path := paths[block.file])
        ]
        found = iter(items.read_chunks(places))
        # Checked after the items, which show whether the existing files belong to another save.
        present = _require_all(location, paths)
        for key, stored in about.tensors.items():
            blocks = list(islice(found, len(stored.blocks)))
            chunks = tuple(block for block in blocks if isinstance(block, Chunk))
            # A block that is not a chunk is of a tensor whose class computes its elements: only its
            # description is kept.
            if len(chunks) < len(blocks):
                leaves[key] = next(block for block in blocks if not isinstance(block, Chunk))
                continue
            dtype = moments.choose_dtype(chunks, stored.dtype)
            leaf = GlobalTensor(dtype, stored.shape, chunks)
            shape = about.shapes.get(key)
            leaves[key] = leaf if shape is None else restore(location, key, leaf, shape)
        for key, block in objects.items():
            leaves[key] = tree.convert_file(items.read_object(present[block.file], block))
    parsed = ParsedTree(
        root=leaves,
        where=str(location),
        files={**_list_copies(location, about.files - used), **items.list_sources()},
        world=len({match[1] for name in used if (match := _DATA.fullmatch(name))}) or 1,
        globals=items.globals | about.globals,
        plain_is_buffer=False,
        directory=about.directory,
        notes=_describe_stale(location, about.files),
    )
    return about, parsed


def _list_copies(location: Location, names: set[str]) -> dict[str, SourceFile]:
    # With ``use_collectives=False``, every rank stores its own copy of an object.
    paths = [location.files[name] for name in sorted(names) if name in location.files]
    return {str(path): SourceFile(str(path), get_size(path)) for path in paths}


def _describe_stale(location: Location, named: set[str]) -> list[str]:
    """Return notes about files that the metadata do not name."""
    # A rank that had nothing to save leaves an empty file, which no metadata names.
    rest = [
        name
        for name, path in location.files.items()
        if name.endswith(".distcp") and name not in named and path.stat().st_size
    ]
    shown = ", ".join(rest[:_LISTED])
    return [f"this directory also contains files of another save: {shown}"] if rest else []


def find_metadata_files(location: Location) -> list[Path]:
    """Return ``.metadata``, or the metadata file of every rank.

    Raises:
        IncompleteError: there is none, or a rank's is missing.
    """
    if METADATA in location.files:
        return [location.files[METADATA]]
    ranks = {
        int(match[1]): path
        for name, path in location.files.items()
        if (match := _RANK_METADATA.fullmatch(name))
    }
    if not ranks:
        raise IncompleteError(
            location,
            "contains .distcp files but no .metadata. DCP writes .metadata last: the save was"
            " interrupted, or .metadata is on another node",
            "copy .metadata (a hidden file) here from the node of rank 0, or pass that node's"
            " directory as a second source",
        )
    writers = {int(match[1]) for name in location.files if (match := _DATA.fullmatch(name))}
    missing = list_missing_ranks(ranks, range(max(ranks) + 1)) or sorted(writers - ranks.keys())
    if missing:
        raise IncompleteError(
            location,
            f"contains metadata of rank {max(ranks)}, but not of rank {missing[0]}",
            FETCH_MISSING,
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _require_all(location: Location, paths: Mapping[str, Path | None]) -> dict[str, Path]:
    missing = sorted(name for name, path in paths.items() if path is None)
    if missing:
        raise IncompleteError(location, f"{missing[0]} is missing", FETCH_MISSING)
    return {name: path for name, path in paths.items() if path is not None}


def _nest(location: Location, about: Metadata, leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state dict in its order: joined keys can collide, but their paths cannot."""
    root: dict[Any, Any] = {}
    containers: list[tuple[dict[Any, Any], Any]] = []  # each after the one that contains it
    paths = parse_flat_paths(about.paths) or about.paths
    for key in sorted(leaves, key=_find_positions(about, leaves).__getitem__):
        if paths and key not in paths:
            raise CorruptError(
                location, f"lists {key!r}, but does not state its path in the state dict"
            )
        *parents, last = paths.get(key) or _guess_path(key)
        node = root
        for part in parents:
            if part not in node:
                node[part] = {}
                containers.append((node, part))
            node = node[part]
            if not isinstance(node, dict):
                raise CorruptError(location, f"{key!r} has a path inside that of a tensor")
        if last in node:
            raise CorruptError(location, f"{key!r} is stored more than once")
        node[last] = leaves[key]
    for parent, part in reversed(containers):
        parent[part] = _restore_list(parent[part])
    return root


def _restore_list(items: dict[Any, Any]) -> dict[Any, Any] | list[Any]:
    # DCP converts each key of a dict to a str, so ints are positions (torch 2.13 ``_traverse.py``).
    is_list = all(type(key) is int for key in items) and sorted(items) == list(range(len(items)))
    return [items[n] for n in range(len(items))] if is_list else items


def _find_positions(about: Metadata, leaves: Mapping[str, Any]) -> dict[str, int]:
    """Return each key's position: paths have the state dict's order, tensors that of the ranks."""
    return {key: n for n, key in enumerate(dict.fromkeys([*about.paths, *leaves]))}


def parse_flat_paths(paths: Mapping[str, tuple[Any, ...]]) -> Mapping[str, tuple[Any, ...]] | None:
    """Return the paths of a state dict that its program flattened; None if it did not.

    With paths of one part the moments, ``optimizer.state.<fqn>.<slot>``, would look like weights.
    ``model.<fqn>`` is taken for the weight ``<fqn>`` of the optimizer if all its names match.
    """
    matches = {key: _OPTIMIZER_KEY.match(key) for key, path in paths.items() if len(path) == 1}
    found = {key: (match[1], key[match.end() :]) for key, match in matches.items() if match}
    if not found or len(matches) < len(paths):
        return None
    trained = {
        rest.removeprefix("state.").rpartition(".")[0]
        for _, rest in found.values()
        if rest.startswith("state.")
    }
    tops = tuple(f"{t}." for t in _MODELS if all(f"{t}.{fqn}" in paths for fqn in trained))
    of_model = {key: tuple(key.split(".", 1)) for key in paths if key.startswith(tops)}
    return {**paths, **of_model, **found}


def _guess_path(key: str) -> tuple[Any, ...]:
    """Guess the path of a key without a stored one, such as ``optim.state.<fqn>.<slot>``."""
    top, _, rest = key.partition(".")
    if not rest or top not in (*_MODELS, *_OPTIMIZERS):
        return (key,)
    part, _, below = rest.partition(".")
    fqn, _, leaf = below.rpartition(".")
    if part == "state" and fqn:
        return (top, part, fqn, leaf)
    if part == "param_groups" and fqn:
        number = counts.parse_index(fqn)
        return (top, rest) if number is None else (top, part, number, leaf)
    return (top, rest)
