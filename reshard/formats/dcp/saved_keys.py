"""Keep the keys of a DCP directory, so that the program that saved it loads the output.

Programs name the parts of their state dicts as they like (Composer ``state.model`` and
``state.optimizers.DecoupledAdamW``, torchtune ``optimizer.state.0.exp_avg``, torchtitan
``optimizer.state.<fqn>.exp_avg``), and ``dcp.load`` looks for exactly these keys. Weights and
optimizer slots are cut again; all other items are copied byte by byte, so that no object in them
has to be understood.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from reshard.containers import skeletons
from reshard.containers.skeletons import LaidOut
from reshard.core.box import whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import UINT8, DType
from reshard.core.location import Location
from reshard.core.manifest import WEIGHT_KINDS, Entry, Key, Manifest
from reshard.formats.base import StateConversion
from reshard.formats.dcp import metadata, reader, writer
from reshard.formats.dcp.items import ZIP
from reshard.formats.dcp.metadata import Block, Metadata, StoredTensor
from reshard.formats.dcp.writer import CopiedTensor
from reshard.formats.request import Request
from reshard.state_dict import torch_state_dict
from reshard.state_dict.torch_state_dict import Value
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path, find_rank
from reshard.training import copied_files
from reshard.training.copied_files import ITEM
from reshard.training.state import WritableState
from reshard.units import some


@dataclass(frozen=True, slots=True)
class SavedKeys:
    """The items of a DCP directory.

    Args:
        about: its metadata.
        directory: where its files are.
        owners: key in ``.metadata`` -> the entry of the manifest that has the tensor.
        beside: the source's files that are not DCP's, name below the directory -> size.
    """

    about: Metadata
    directory: str
    owners: Mapping[str, Key]
    beside: Mapping[str, int] = field(default_factory=dict)


def find(conversion: StateConversion) -> SavedKeys | None:
    """Return the items of the source, if the output can have the same keys.

    That is so if the user chose neither another layout, nor a part of the state, nor new param
    groups, and if all of the source is one DCP directory whose names and tensors no pass has
    changed.

    Raises:
        ReshardError: as `metadata.read`.
    """
    manifest, request = conversion.manifest, conversion.request
    given = conversion.options.given()
    is_new = "param_groups" in given or given.get("init_optimizer") == "zeros"
    is_partial = request.weights_only and manifest.has_optimizer
    if not request.keeps_layout or is_partial or is_new or request.live_groups:
        return None
    if request.rng in ("derive", "drop"):
        return None
    paths = {PurePosixPath(path) for path in manifest.files}
    directories = {path.parent for path in paths if path.suffix == ".distcp"}
    if len(directories) != 1:
        return None
    top = directories.pop()
    location = Location([as_path(str(top))])
    if not any(name.endswith(".metadata") for name in location.files):
        return None
    if not all(path.is_relative_to(top) for path in paths):
        return None
    prefix = f"{location}/"
    beside = {
        path.removeprefix(prefix): file.nbytes
        for path, file in manifest.files.items()
        if not path.endswith(".distcp")
    }
    about = metadata.read(reader.find_metadata_files(location))
    saved = SavedKeys(about, str(location), owners={}, beside=beside)
    found = replace(saved, owners=_find_owners(manifest, saved))
    return found if found.owners and _can_copy(found, manifest) else None


def _find_owners(manifest: Manifest, saved: SavedKeys) -> dict[str, Key]:
    """Return the entry of each key; empty if an entry is not exactly one stored tensor."""
    about = saved.about
    keys = _ItemIndex(saved)
    names = reader.parse_flat_paths(about.paths) or about.paths
    owners: dict[str, Key] = {}
    for entry in manifest.entries.values():
        found = {keys.find(chunk) for chunk in entry.chunks}
        key = found.pop() if len(found) == 1 else None
        stored = about.tensors.get(key) if key is not None else None
        is_same = stored is not None and (stored.dtype, stored.shape) == (entry.dtype, entry.shape)
        if key is None or not is_same or key in owners or key not in names:
            return {}
        if entry.kind in WEIGHT_KINDS and names[key][-1] != entry.fqn:
            return {}
        owners[key] = entry.key
    # Names of one weight that are stored twice are equal; each of them gets the kept value.
    kept = {fqn: (kind, fqn) for kind, fqn in owners.values() if kind in WEIGHT_KINDS}
    for key in about.tensors.keys() - owners.keys():
        alias = manifest.tied.get(str(names[key][-1])) if key in names else None
        if alias in kept:
            owners[key] = kept[alias]
    return owners


class _ItemIndex:
    """Finds the key of the item that contains a chunk."""

    def __init__(self, saved: SavedKeys) -> None:
        items: dict[str, list[tuple[int, int, str]]] = {}
        for tensor in saved.about.tensors.values():
            for block in tensor.blocks:
                span = (block.byte_offset, block.byte_offset + block.nbytes, block.key)
                items.setdefault(f"{saved.directory}/{block.file}", []).append(span)
        self._items = {path: sorted(spans) for path, spans in items.items()}

    def find(self, chunk: Chunk) -> str | None:
        """Return the key; None if no item contains the chunk, or the chunk is computed."""
        spans = self._items.get(chunk.file, [])
        at = bisect_right(spans, chunk.byte_offset, key=lambda span: span[0]) - 1
        start, stop = chunk.byte_span
        return spans[at][2] if at >= 0 and spans[at][0] <= start and stop <= spans[at][1] else None


def _can_copy(saved: SavedKeys, manifest: Manifest) -> bool:
    """Return whether every other item is an archive of its own, with a path in the state dict."""
    about = saved.about
    if about.shapes or about.paths.keys() != about.tensors.keys() | about.objects.keys():
        return False
    with SourceFiles() as pool:
        return all(
            (path := f"{saved.directory}/{block.file}") in manifest.files
            and pool.read(path, block.byte_offset, len(ZIP)) == ZIP
            for block in _list_other_blocks(saved)
        )


def _list_other_blocks(saved: SavedKeys) -> Iterable[Block]:
    about = saved.about
    yield from filter(None, about.objects.values())
    for key, tensor in about.tensors.items():
        if key not in saved.owners:
            yield from tensor.blocks


def lay_out(state: WritableState, saved: SavedKeys, request: Request) -> LaidOut:
    """Lay out the items under their keys, and copies of the files beside them.

    Raises:
        ReshardError: as `writer.lay_out_leaves`.
    """
    ranks = request.world_size
    leaves, items = _build_leaves(state, saved, dtype=request.dtype)
    parts = [writer.lay_out_leaves(leaves, shards=ranks)]
    files = []
    for name, size in saved.beside.items():
        path = f"{saved.directory}/{name}"
        parts.append(copied_files.lay_out(name, path))
        files.append(copied_files.build_file(name, path, size))
    notes = []
    per_rank = [name for name in saved.beside if find_rank(name) is not None]
    if per_rank and ranks != len(per_rank):
        notes.append(
            f"{some(per_rank, 1)} belong to one rank each: the program that saved them may need"
            f" such a file for each of the {ranks} ranks"
        )
    return LaidOut(skeletons.join(parts), tuple(notes), (*items, *files))


def _build_leaves(
    state: WritableState, saved: SavedKeys, *, dtype: DType | None
) -> tuple[list[tuple[tuple[Any, ...], Any]], tuple[Entry, ...]]:
    """Build the state dict of the output as leaves with their paths.

    Args:
        dtype: dtype of the parameters; None keeps that of each.

    Returns:
        The leaves, and the entries of the items that are copied.
    """
    values: dict[Key, Value] = {}
    weights = torch_state_dict.build_weights(state, dtype=dtype)
    for member in state.members:
        slots = member.slots.values()
        values.update((each.key, torch_state_dict.build_slot(member, each)) for each in slots)
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    copied: list[Entry] = []
    for key, path in saved.about.paths.items():
        owner = saved.owners.get(key)
        if owner is not None:
            leaf: Any = weights[owner[1]] if owner[0] in WEIGHT_KINDS else values[owner]
        elif key in saved.about.tensors:
            leaf = _copy_tensor(saved, key, saved.about.tensors[key])
            copied += (item for _, item in leaf.blocks)
        else:
            leaf = _build_item(saved, key, saved.about.objects[key])
            copied.append(leaf)
        leaves.append((path, leaf))
    return leaves, tuple(copied)


def _copy_tensor(saved: SavedKeys, key: str, tensor: StoredTensor) -> CopiedTensor:
    blocks = tuple(
        (block.box, _build_item(saved, f"{key} {number}", block))
        for number, block in enumerate(tensor.blocks)
        if block.box is not None
    )
    return CopiedTensor(tensor.dtype, tensor.shape, blocks)


def _build_item(saved: SavedKeys, name: str, block: Block | None) -> Entry:
    """Return the entry of an item's bytes in the source."""
    if block is None:  # `metadata.read` refuses an object without a position
        raise AssertionError(name)
    size = (block.nbytes,)
    path = f"{saved.directory}/{block.file}"
    chunk = contiguous(path, block.byte_offset, UINT8, whole(size))
    return Entry(name, ITEM, UINT8, size, (chunk,))
